"""Where a planted fault starts, what kind of wrong it is called, and what it is shrunk to."""

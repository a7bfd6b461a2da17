"""Where the difference between two programs starts."""

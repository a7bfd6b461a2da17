"""An operator run whole, and run by ranks."""

"""Operators run again: the error they made, told from the error that came in."""

"""Shapes that the wrong elements of a tensor can have."""

"""Faults planted on purpose: what a check would have caught."""

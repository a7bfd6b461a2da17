"""Splits that are found by running the operator."""

"""Operators, module names and source lines of a running program."""

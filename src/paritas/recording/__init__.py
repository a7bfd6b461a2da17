"""Tensors out of a running program: eager, op by op, and from inside compiled code."""

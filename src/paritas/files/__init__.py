"""Tensors and records in files: how they are stored, and read without trusting them."""

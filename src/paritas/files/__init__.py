"""Tensors and records in files: how they are stored, and how untrusted files are read."""

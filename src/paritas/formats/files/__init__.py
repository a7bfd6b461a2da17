"""Tensors and records in files: how they are stored, and how untrusted files are read.

What reads a file raises `UsageError` if the file is missing, damaged or not supported.
"""

"""Graphs as others keep them: exported programs, FX, nnScaler's checkpoints."""

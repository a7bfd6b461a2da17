"""A whole model on ranks: under a parallel plan, or as distributed tensors."""

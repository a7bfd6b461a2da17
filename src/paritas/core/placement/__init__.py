"""How tensors are placed on ranks: splitting, assembling, reducing."""

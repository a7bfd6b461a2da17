"""How tensors lie on ranks: split, put together, reduced."""

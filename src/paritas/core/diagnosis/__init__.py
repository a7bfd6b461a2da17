"""What kind of wrong: where in a tensor, and which pattern explains the numbers."""

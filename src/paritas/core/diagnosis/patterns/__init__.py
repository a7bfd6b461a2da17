"""Ways of being wrong. Each module proposes those of its kind for a case."""

"""The judge on models that nobody here wrote."""

"""The operator and the arguments of a configuration."""

"""Which values of two dumps belong together."""

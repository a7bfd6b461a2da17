"""The language in which operators say how they can be split."""

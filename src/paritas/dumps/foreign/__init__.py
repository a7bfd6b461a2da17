"""Dumps of other tools, read as if they were ours. Their files are hostile until checked."""

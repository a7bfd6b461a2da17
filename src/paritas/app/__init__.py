"""The edges: the command line, the pytest plugin, doctor."""

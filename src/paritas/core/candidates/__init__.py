"""Candidates by name, for runtimes other than `torch.compile`."""

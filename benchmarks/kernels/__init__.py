"""Kernels of others, judged: torch's operators compiled by Inductor, and published sets."""

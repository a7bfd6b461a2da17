"""Ways to make a failing program smaller, each of which keeps its failure."""

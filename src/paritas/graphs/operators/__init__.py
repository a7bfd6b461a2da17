"""One call of a graph: what it runs, on which values, split in which ways."""

"""Read a graph, and check every operator of it."""

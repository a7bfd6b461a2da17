"""What is on disk: the store, its index, and readers of other layouts."""

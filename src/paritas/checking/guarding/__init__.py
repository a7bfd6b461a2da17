"""guard(): every graph a compiler makes, checked as it runs."""

"""Values that several ranks share, put back together."""

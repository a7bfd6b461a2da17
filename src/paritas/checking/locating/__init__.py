"""Where a difference starts: the first wrong node, a fused set, a pass."""

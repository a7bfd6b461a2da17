"""The faults themselves: where each can be planted, and what the call then does."""

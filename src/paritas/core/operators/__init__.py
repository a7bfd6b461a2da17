"""What each operator is: its names, its parameters and what it computes."""

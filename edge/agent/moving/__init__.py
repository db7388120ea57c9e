"""A node's part in a move of its run from one placement to the next."""

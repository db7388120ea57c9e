"""What a helper node has: adapter modules that it fits for hosts."""

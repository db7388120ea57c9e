"""Make a node's parts of checkpoints, keep them on disk, and load them."""

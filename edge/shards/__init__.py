"""A node's parts of checkpoints: made, kept on disk, loaded."""

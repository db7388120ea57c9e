"""What a run leaves behind: saved by each node, and loaded again."""

"""The commands of a node, one file each, and how a node gets its certificate."""

"""The commands of a node, one file each, and the enrollment of a node with a coordinator."""

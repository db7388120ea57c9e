"""The computation of a node: the blocks that it hosts and the actions on them."""

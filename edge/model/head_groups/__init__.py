"""Blocks by head groups: what a subnet's weights are, and how a block runs with only some of its subnets."""

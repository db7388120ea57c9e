"""A run at a node: the loop, the executor of its actions, and the reports to the coordinator."""

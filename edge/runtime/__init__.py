"""The runtime of a run at a node: the loop, the executor of its actions, inference, and reports to the coordinator."""

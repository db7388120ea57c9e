"""Runtime of a run at a node: loop, executor of its actions, inference, and reports to the coordinator."""

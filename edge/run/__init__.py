"""The event loop of a run at a node, with the engine's record and the reports to the coordinator."""

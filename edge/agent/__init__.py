"""The agent's process: membership, what the coordinator asks, the run that is under way."""

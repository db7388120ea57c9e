"""The agent's process: its membership, the coordinator's calls, and the run that is under way."""

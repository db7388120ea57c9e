"""Agent: the process of a node, its membership, the coordinator's calls, and the active run."""

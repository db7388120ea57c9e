"""What is decided for a run, and what follows from it: plan, turns, actions of each node."""

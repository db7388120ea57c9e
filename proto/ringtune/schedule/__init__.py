"""Schedule of a run: course, placement, plan, turns, and the actions of each node."""

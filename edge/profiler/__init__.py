"""Time every kind of work of a run at this node, and remember the times."""

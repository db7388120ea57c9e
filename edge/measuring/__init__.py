"""How fast this node is: every kind of work of a run, timed, and remembered."""

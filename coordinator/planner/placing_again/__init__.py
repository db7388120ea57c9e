"""Where the units of a run go that is under way: without a node that is lost, or as boards change their pace."""

"""Go on with a run: from which saved step, with which nodes, and what each of them loads."""

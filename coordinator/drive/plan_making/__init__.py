"""Make the plan of one run: the first look, links, and planning beside the run's thread."""

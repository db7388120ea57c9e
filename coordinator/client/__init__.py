"""The submitter's side of a run: a connection to the coordinator, local nodes, and the folder of the run."""

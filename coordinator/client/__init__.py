"""The submitter's side of a run: connection to the coordinator, local nodes, and the run's folder."""

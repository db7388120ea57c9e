"""The submitter's side of a run, with nodes on this machine or on a coordinator's nodes."""

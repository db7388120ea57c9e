"""The submitter's side of a run, on this machine or on a coordinator's nodes."""

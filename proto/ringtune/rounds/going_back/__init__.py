"""When a run goes back to a snapshot: hosts that are lost, and steps whose values are not finite."""

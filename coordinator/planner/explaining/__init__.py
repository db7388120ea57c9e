"""Says in words why a plan is as it is."""

"""Slices that follow the unfreezing schedule: a run moves to the placement that is best for what trains now."""

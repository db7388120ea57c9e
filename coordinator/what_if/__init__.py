"""What-if studies of a plan."""

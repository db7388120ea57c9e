"""Print and draw what-if studies and sweeps."""

"""Predicted times of a ring, by formulas and by the simulator."""

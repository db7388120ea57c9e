"""Predict the time of a job on a ring, by formulas and by the simulator."""

"""Giving a run's adapter away."""

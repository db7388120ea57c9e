"""Sections of a job file, each for one thing that a run may do beside training on data."""

"""Profiler of a node: times of every kind of work of a run, measured or read from its cache."""

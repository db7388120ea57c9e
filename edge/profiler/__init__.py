"""The profiler of a node: the times of every kind of work of a run, measured or from its cache."""

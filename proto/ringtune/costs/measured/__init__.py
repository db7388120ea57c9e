"""Times of a machine or a run, made into a profile or compared with one."""

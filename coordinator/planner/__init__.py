"""The planner assigns blocks to nodes so that the job takes the least time within every node's memory.

``ring_costs`` turns a profile into tables of seconds, from which ``step_time`` predicts a job. ``local_search``
finds the best rings by these predictions. ``judge`` simulates the best few, and ``explain`` gives the reasons.
"""

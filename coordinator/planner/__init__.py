"""The planner chooses which node hosts which blocks, so that the job takes least time within every node's memory.

``ring_costs`` turns a profile into tables of seconds, from which ``step_time`` predicts a job. ``exact_search`` and
``local_search`` look for the best ring by these predictions. ``judge`` lets the simulator decide between the best few,
and ``explain`` gives the reasons.
"""

"""The planner chooses which node hosts which blocks, so that the job takes least time within every node's memory.

``ring_costs`` turns a profile into tables of seconds, ``step_time`` predicts a job from them, ``search_exact`` and
``search_local`` look for the best ring, ``judge`` lets the simulator decide between the best few, ``explain`` says why.
"""

"""The planner: assigns blocks to nodes for the least predicted seconds of the job within every node's memory.

``ring_costs`` makes tables of seconds from a profile, ``step_time`` predicts a job from them, ``local_search`` searches
rings by these predictions, ``judge`` simulates the best few, ``explain`` gives the reasons.
"""

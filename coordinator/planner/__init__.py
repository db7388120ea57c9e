"""The planner chooses which node hosts which blocks, so that the job takes least time within every node's memory.

``predict.ring_costs`` turns a profile into tables of seconds, from which ``predict.step_time`` predicts a job.
``search.exact`` and ``search.local_search`` look for the best ring by these predictions. ``predict.judge`` lets the
simulator decide between the best few, and ``explain`` says why.
"""

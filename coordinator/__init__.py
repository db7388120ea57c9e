"""The coordinator and its submitter: members, the plan of a run, its control, and what it leaves.

Both sides live here. ``server`` and ``run`` are the coordinator's; ``cli``, ``api`` and ``client`` are the submitter's;
``planner``, ``screen`` and ``web`` serve both. Neither side imports torch or the agent; they talk to agents over gRPC
only.
"""

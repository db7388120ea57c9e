"""The coordinator and the submitter: members, plans, control of runs, and results.

``server`` and ``run`` belong to the coordinator; ``cli``, ``api`` and ``client`` to the submitter; ``planner``,
``screen`` and ``web`` serve both. Neither side imports torch or the agent: they call agents over gRPC only.
"""

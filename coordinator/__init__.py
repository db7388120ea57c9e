"""The coordinator and its submitter: who is a member, who hosts what, how a run is driven, and what is left of it.

Both sides live here. The coordinator's are ``members``, ``server``, ``drive``, ``records`` and ``kept_runs``; the
submitter's are ``submit``, ``run_folder``, ``export``, ``demo``, ``estimates`` and ``what_if``; ``planner``, ``screen``
and ``commands`` serve both. Neither side imports torch or the agent; they talk to agents over gRPC only.
"""

"""The files that a run writes while it goes on: metrics, report, trace, results."""

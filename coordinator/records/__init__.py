"""What a run writes down while it goes on: metrics, report, trace, results."""

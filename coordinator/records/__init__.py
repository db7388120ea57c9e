"""The files that a run writes while it goes on: metrics, report, trace, results.

The coordinator makes them in memory and sends them as events. Others put the events on disk: ``kept_runs`` at the
coordinator, ``run_folder`` at the submitter.
"""

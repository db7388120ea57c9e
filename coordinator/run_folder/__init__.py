"""The folder of a run on the submitter's machine.

The submitter writes it, from the events that ``records`` sends while the run goes on, or that ``kept_runs`` has kept.
"""

"""A page that shows a run in a browser, and figures for Prometheus: one more reader of the run's events.

``page_state`` folds events into a bounded state, ``streams`` sends each browser the changes of it, and ``server``
serves both.
"""

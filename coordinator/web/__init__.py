"""A page that shows a run in a browser, and metrics for Prometheus.

``page_state`` folds the run's events into a bounded state, ``streams`` sends each browser its changes, and ``server``
serves both.
"""

"""Drive a run or a measurement: calls to nodes, answers, failures."""

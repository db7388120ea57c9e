"""Predict with the result of a run: start the process that has torch, and write what it says beside the rows."""

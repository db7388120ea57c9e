"""Predict what a plan would do with other nodes, links or settings."""

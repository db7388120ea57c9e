"""Estimate the facts of nodes that do not exist yet."""

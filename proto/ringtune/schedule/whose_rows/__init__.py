"""Whose rows are trained on: without those of an owner that is lost, and for which user."""

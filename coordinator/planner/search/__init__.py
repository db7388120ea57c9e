"""Searches for the best ring."""

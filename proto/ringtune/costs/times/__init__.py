"""Seconds that actions take on a node of a profile."""

"""Decisions of a run and their consequences: plan, turns, actions of each node."""

"""Nodes that come while a run is under way: asked about themselves, checked, and taken into it."""

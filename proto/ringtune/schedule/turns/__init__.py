"""Turns of owners, what trains at their steps, and which updates each unit has had before."""

"""Costs of a run: profiles of nodes and links, seconds of actions and messages, bytes of memory and disk."""

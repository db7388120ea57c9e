"""Adapters of any kind: what their settings say, and what may be done with them."""

"""Fetch a node's base weights over the network, and keep them in a cache on its disk."""

"""Calls between nodes: addresses, connections, statuses and codecs."""

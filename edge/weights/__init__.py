"""Fetch a node's base weights over the network, and keep them in a cache on its disk.

``ringtune.weights`` has the manifests and messages that both ends of a fetch share.
"""

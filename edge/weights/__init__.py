"""The base weights of a node: fetched over the network, and kept in a cache on its disk."""

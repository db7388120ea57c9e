"""Base weights of a node: its own model folder, or tensors fetched from other nodes into a cache on its disk."""

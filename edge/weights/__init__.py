"""Fetch the weights of a node without a copy of the model, and keep them in a cache."""

"""Auxiliary models: the adapters ``linear`` and ``mlp`` of our own, beside matrices of the blocks."""

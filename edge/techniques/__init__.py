"""Techniques that need tensors: what a forward keeps, adapters that helpers fit, scores of operations."""

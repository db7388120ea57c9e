"""Weights for a node without a copy of the model: fetched by digest, kept in a cache, served to others."""

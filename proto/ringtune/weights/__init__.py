"""Base weights by digest: manifests, sources, and their messages."""

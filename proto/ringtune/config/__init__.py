"""Sections of ``job.toml`` as values; techniques that have sections of their own build on them."""

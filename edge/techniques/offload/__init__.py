"""Adapters that helpers fit, also those of several users (ColA)."""

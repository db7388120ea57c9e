"""Demonstrate training with a real model and real sentences on local nodes, with nothing but the package index."""

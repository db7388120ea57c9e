"""Stages: ranges of blocks that one or more nodes host, and what several hosts of one stage owe each other."""

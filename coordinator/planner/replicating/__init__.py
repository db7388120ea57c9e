"""Stages with several hosts: which are worth trying, and whether one of them is faster than the best ring."""

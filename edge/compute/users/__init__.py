"""Adapters of several users in one node: sets of parameters, and forwards in which each row goes through its own."""

"""Processor, memory and process of this machine, without torch, for agents and coordinator.

It is the one reader of limits; ``edge.machine`` sets a device up within them.
"""

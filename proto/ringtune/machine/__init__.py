"""Processor, memory and process of this machine, without torch, for agents and coordinator.

All limits are read here; ``edge.machine`` configures a device within them.
"""

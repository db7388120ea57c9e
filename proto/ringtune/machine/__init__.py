"""Read how much processor and memory a process may use here, without torch, for agents and coordinator.

It is the one reader of limits. ``edge.machine`` sets a device up within them.
"""

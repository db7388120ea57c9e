"""Set up this device for an agent: memory, threads and libraries, torch among them.

``ringtune.machine`` reads what a process may use, without torch, for agents and coordinator alike.
"""

"""The processor and the memory that a process may use here: the one reader of limits, for agents and coordinator."""

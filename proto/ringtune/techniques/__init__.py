"""The techniques of a run, a module each: its section of the job, its refusals, and its decisions for each turn."""

"""The job: reading, checks, description of its keys, rows of its files, and the form of its result."""

"""Job: parsing, checks, reference of its keys, rows of its data files."""

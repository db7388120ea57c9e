"""Operation tables: which subnet does what for which micro-batch, and how such tables are chosen."""

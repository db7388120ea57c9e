"""Operation tables: how they are written, read and chosen."""

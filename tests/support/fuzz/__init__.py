"""Hostile bytes for everything that reads what another machine, or a disk, has given."""

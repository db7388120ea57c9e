"""Seconds and bytes of a virtual run: how long actions take, what lies at nodes, and what is measured of it."""

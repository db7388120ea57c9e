"""Search for the ring with the least predicted time."""

"""Set up this device for an agent: memory, threads and libraries, torch among them."""

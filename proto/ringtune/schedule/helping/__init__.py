"""Which nodes help others with their adapters, and with what."""

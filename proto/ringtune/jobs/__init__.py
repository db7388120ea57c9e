"""What the user asks for: ``job.toml`` as values."""

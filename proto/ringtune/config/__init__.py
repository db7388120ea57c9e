"""The sections of ``job.toml`` as values, below the techniques that have sections of their own."""

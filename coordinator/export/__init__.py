"""Export a run's adapter to give it away."""

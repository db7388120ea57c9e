"""The page of a run: its state, its frames, its server."""

"""The coordinator's state machine of a run, and checkpoints."""

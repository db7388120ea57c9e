"""The coordinator of a run as a state machine: turns, migration, recovery, checkpoints, evaluation."""

"""One node's state machine, with its events and commands."""

"""The state machine of one node, with its events and commands."""

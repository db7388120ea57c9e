"""Checkpoints and snapshots of a node's trained state: on disk, in memory, and fetched from other nodes."""

"""Checkpoints and snapshots of what a node has trained: on disk, in memory, and fetched from other nodes."""

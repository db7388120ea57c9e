"""What a node has trained: kept in memory and on disk, fetched from other nodes, and loaded again."""

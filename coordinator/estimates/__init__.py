"""Facts about nodes that are not there."""

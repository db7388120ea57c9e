"""Keep the members with their addresses, and choose those that take part in a run."""

"""What nodes report of a run, and which of them is lost where several complain."""

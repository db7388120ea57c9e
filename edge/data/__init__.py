"""An owner's data: rows of a file, and their tokens. None of it ever leaves the node."""

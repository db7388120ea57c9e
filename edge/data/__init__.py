"""Read an owner's data: rows of a file and their tokens, which never leave the node."""

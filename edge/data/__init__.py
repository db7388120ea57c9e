"""An owner's data: readers by task, tokens, and batches; none of it leaves the node."""

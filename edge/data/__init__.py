"""An owner's data: readers by task, tokens, and batches; rows and tokens never leave the node."""

"""Files: durable writes, folders that are ours, strict reading, tensors, tables, and pieces for the wire."""

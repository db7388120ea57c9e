"""Files: durable writes, folders of ours, strict reading, tensors, tables, and pieces for the wire."""

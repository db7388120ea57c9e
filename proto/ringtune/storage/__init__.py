"""Files: durable writes, folders with marker and lock, strict parsing, tensors, tables, and chunks for the wire."""

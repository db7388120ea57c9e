"""What calls to nodes are made of: files that go and come, and the meaning of a failure."""

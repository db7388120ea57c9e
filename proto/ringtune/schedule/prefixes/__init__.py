"""Which batches are kept where, and when they come again."""

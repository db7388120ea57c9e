"""What is planned, in words: slices, rows, groups of units, operations and helpers."""

"""Frozen matrices that are held small: in bfloat16, or in int8 with a scale for each row."""

"""Who takes what over from whom: blocks at a turn boundary, copies of what was trained."""

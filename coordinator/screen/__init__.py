"""Print and draw plans, progress, profiles and lists."""

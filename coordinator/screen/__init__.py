"""Print and draw plans, progress, profiles, predictions and lists."""

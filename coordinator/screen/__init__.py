"""Text and tables of plans, progress, profiles and lists on a terminal."""

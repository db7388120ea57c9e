"""The commands that this package adds to ``ringtune``; modules here import nothing heavy at the top."""

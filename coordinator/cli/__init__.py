"""The commands that this package adds to ``ringtune``; command modules import nothing heavy at the top."""

"""Actions as words, and tables of them for people and tests."""

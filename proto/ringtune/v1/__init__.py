"""Version 1 of the wire messages; ``proto/generate.py`` generates the modules here."""

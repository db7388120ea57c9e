"""Wrong input of every kind: one error line, the stated exit code, nothing left."""

"""The folder of a run on the submitter's machine."""

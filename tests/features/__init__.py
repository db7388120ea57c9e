"""The features of a run as values, each with the job that turns it on and what it has to equal; no tests."""

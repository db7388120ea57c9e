"""A whole job: read, checked, described, with its rows and its result."""

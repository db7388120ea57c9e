"""Calls that are made again where a request or its reply was lost, and carried out once."""

"""``[operations]`` of a job: its keys, what they go together with, and a given table."""

"""What a job and its nodes agree on before anything is placed: a course, the order of its owners, its operations."""

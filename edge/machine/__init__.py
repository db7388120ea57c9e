"""This device: processor, memory, threads, libraries."""

"""Run nodes on this machine for one command: their template, their processes, and their ring."""

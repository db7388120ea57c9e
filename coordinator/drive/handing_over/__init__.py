"""What nodes hand in at the end of a run, and after its best evaluation: by the coordinator's disk to the submitter."""

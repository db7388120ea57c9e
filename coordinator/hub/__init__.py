"""Turn the id of a model on a hub into a folder on this machine, once, before a job goes anywhere."""

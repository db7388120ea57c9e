"""The model on a device: the parts that a node hosts, and how they are run, trained and saved."""

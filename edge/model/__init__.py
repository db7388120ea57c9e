"""The model on a device: what a node hosts of it, and how that is run, trained and saved."""

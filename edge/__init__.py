"""The agent on a device: it hosts a slice of the model, owns its data, and takes part in runs."""

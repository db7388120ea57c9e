"""The agent on a device hosts a slice of the model, owns the device's data, and takes part in runs."""

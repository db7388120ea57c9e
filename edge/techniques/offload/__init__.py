"""The offload of adapters to helpers (ColA), also those of several users."""

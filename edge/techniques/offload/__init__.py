"""Offload of adapters to helpers (ColA), for one or several users."""

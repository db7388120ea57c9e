"""Facts of a model and its adapters that costs are computed from."""

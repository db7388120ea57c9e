"""What a model folder holds: families, shapes of tensors, adapter configurations."""

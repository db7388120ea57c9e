"""Techniques with tensors: activation checkpointing, VeLoRA, offload of adapters, and scores of operations."""

"""Torch model of a node: skeleton, slice, embedding and head, adapters, optimizers, and the result of a run."""

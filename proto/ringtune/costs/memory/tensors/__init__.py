"""Bytes of single kinds of tensors: masks, logits, weights that are held small."""

"""Tell what a model folder holds, without torch: families, shapes of tensors, adapter configurations.

``edge.model`` runs such a model.
"""

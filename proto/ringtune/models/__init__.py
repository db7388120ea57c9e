"""Model folders without torch: families, shapes of tensors, adapter configurations, files of results.

``edge.model`` runs such a model.
"""

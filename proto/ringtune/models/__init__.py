"""Model folders without torch: families, shapes, adapter configurations, result files. Models run in ``edge.model``."""

"""The event loop of a run at a node: it feeds the engine and reports."""

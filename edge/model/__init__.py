"""Run, train and save with torch the parts of a model that a node hosts."""

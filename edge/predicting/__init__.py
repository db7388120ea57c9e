"""Predict for rows with a whole model in one process: labels, answers, text that goes on. Nothing here trains."""

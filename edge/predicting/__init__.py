"""Predict for rows with a whole model in one process: labels, answers, generated text. Nothing here trains."""

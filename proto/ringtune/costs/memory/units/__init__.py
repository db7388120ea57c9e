"""Bytes that a unit that trains has besides its weights: its gradient, its optimizer's state."""

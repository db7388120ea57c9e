"""Invariants that hold for every plan and every driver."""

"""Outputs of the frozen blocks that a host keeps for rows that come again."""

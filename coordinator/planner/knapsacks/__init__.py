"""Knapsacks: which subnet does what for which micro-batch, so that scores are large and boards not overloaded.

This room alone may use numpy; whoever needs it imports it when it is needed, never at start-up.
"""

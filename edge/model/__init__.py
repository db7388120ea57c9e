"""Run, train and save with torch the parts of a model that a node hosts.

``ringtune.models`` tells what a model folder holds, without torch and without a tensor in memory.
"""

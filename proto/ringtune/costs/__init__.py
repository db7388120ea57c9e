"""Seconds and bytes of a run from measured profiles: actions, messages, memory, disk; and their calibration."""

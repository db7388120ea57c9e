"""Commands of ``ringtune``, one module each; their top-level imports are light."""

"""Commands of ``ringtune``, a module each; command modules import nothing heavy at the top."""

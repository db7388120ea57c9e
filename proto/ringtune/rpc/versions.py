"""Which versions of RingTune work together: those with the same first two numbers, as 0.2.0 and 0.2.7."""

from __future__ import annotations

from ringtune import __version__
from ringtune.errors import UsageError


def is_compatible(version: str) -> bool:
    """Whether a process of ``version`` and this one understand each other."""
    return version.split(".")[:2] == __version__.split(".")[:2]


def require_compatible(who: str, version: str) -> None:
    """Refuse to work with a process of another version.

    Args:
        who: it is, for the message: ``node pi``.
        version: its version; empty = it did not say.

    Raises:
        UsageError: the versions differ.
    """
    if not is_compatible(version):
        raise UsageError(
            f"{who} runs ringtune {version or 'of an unknown version'}, this is {__version__}; install the same "
            "version on both"
        )

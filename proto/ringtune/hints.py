"""Command lines that RingTune prints for users to type; a word in capitals is a placeholder.

``tests/contract/test_hints.py`` parses these lines, and the quoted commands in messages, with the real command line.
"""

from __future__ import annotations

import shlex

from ringtune import __version__
from ringtune.transport.credentials import is_encrypted
from ringtune.transport.endpoints import is_allowed, is_loopback, join_address, split_address

WHEEL = f"ringtune-{__version__}-py3-none-any.whl"
"""File that ``pip wheel --no-deps --wheel-dir dist .`` makes in a checkout."""


def hint_to_install(extra: str) -> str:
    """Write how to install RingTune with an extra; it is in no package index."""
    return f"in a checkout pip install '.[{extra}]', elsewhere pip install './{WHEEL}[{extra}]'"


def hint(name: str, *words: str, coordinator: str = "") -> str:
    """Write a command line of RingTune.

    Example: ``hint("nodes", coordinator="pi:7070")`` is ``ringtune nodes --coordinator pi:7070 --insecure``. For
    ``coordinator`` on another machine ``--insecure`` is added, unless this process encrypts; empty = no option.
    """
    options = ["--coordinator", coordinator] if coordinator else []
    options += ["--insecure"] if coordinator and not is_allowed(coordinator, insecure=False) else []
    return shlex.join(["ringtune", name, *words, *options])


def hint_to_start_coordinator(address: str) -> str:
    """Write the command that starts a coordinator that is reached at ``address``."""
    if is_loopback(address):
        return hint("coordinator", "--bind", address.partition(",")[0])
    port = split_address(address.partition(",")[0], option="--coordinator")[1]
    plain = [] if is_encrypted() else ["--insecure"]
    return hint("coordinator", "--bind", join_address("0.0.0.0", port), *plain)  # noqa: S104 - the user decides

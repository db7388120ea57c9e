"""Names of nodes and runs: their form, and checks of names from outside."""

from __future__ import annotations

import re
import time

from ringtune.errors import UsageError

NODE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
RUN_ID = re.compile(r"r[0-9]{8}-[0-9]{6}-[0-9a-f]{8}")


def check_node_name(name: str) -> str:
    """Return ``name`` if it is a valid node name; raises ``UsageError``."""
    if not NODE_NAME.fullmatch(name) or ".." in name:
        raise UsageError(
            f"node name {name!r} is not allowed; use 1 to 63 small letters, digits, '.', '-' and '_', "
            "starting with a letter or digit, without '..'"
        )
    return name


def node_name_from_host(host: str) -> str:
    """Make a node name from the first label of a host name; each run of other characters becomes a dash.

    Example: ``Lab Pi.local`` becomes ``lab-pi``; if no character is left, the name is ``node``.
    """
    name = re.sub(r"[^a-z0-9_-]+", "-", host.split(".")[0].lower()).lstrip("-_")[:63]
    return name or "node"


def naming_node(node: str, message: str) -> str:
    """Return the message of a node's error with ``node NAME: `` before it, unless it names the node already.

    Example: for node ``pi``, ``can't read /data/pi/train.csv`` becomes ``node pi: can't read /data/pi/train.csv``.
    """
    is_named = re.search(rf"\bnode {re.escape(node)}(?![._-]*[a-z0-9])", message)
    return message if is_named else f"node {node}: {message}"


def make_run_id(started_unix_s: float, token: bytes) -> str:
    """Make a run id that sorts by start time, such as ``r20260102-030405-0a1b2c3d``, from four random bytes."""
    if len(token) < 4:
        raise ValueError("a run id needs four random bytes")
    return f"r{time.strftime('%Y%m%d-%H%M%S', time.gmtime(started_unix_s))}-{token[:4].hex()}"


def is_run_id(name: str) -> bool:
    """Whether ``name`` has the form of a run id."""
    return RUN_ID.fullmatch(name) is not None


def check_run_id(run_id: str) -> str:
    """Return ``run_id`` if it has the form ``rYYYYMMDD-HHMMSS-xxxxxxxx``; else raise ``UsageError``."""
    if not is_run_id(run_id):
        raise UsageError(f"run id {run_id!r} is not of the form rYYYYMMDD-HHMMSS-xxxxxxxx")
    return run_id

"""Say where a coordinator listens, and with which commands nodes join it and jobs are trained on it."""

from __future__ import annotations

import shlex
from pathlib import Path

from ringtune.hints import hint, hint_to_start_coordinator
from ringtune.rpc.addresses import is_loopback, is_wildcard, join_address, split_address
from ringtune.trust.places import ADMIN, VARIABLE
from ringtune.trust.speaking import is_encrypted


def reachable_address(bound: str, own_host: str) -> str:
    """Return ``host:port`` where a coordinator is reached; a bind to all addresses is no address to call.

    Example: ``0.0.0.0:7070`` on a machine that is 10.0.0.7 is ``10.0.0.7:7070``.

    Args:
        bound: where it listens.
        own_host: this machine's address on its network; empty = it has none.
    """
    port = split_address(bound, option="--bind")[1]
    return join_address(own_host or "HOST", port) if is_wildcard(bound) else bound


def listening_line(bound: str) -> str:
    """Describe where a coordinator listens; for one that only this machine reaches, how others would."""
    if not is_loopback(bound):
        return f"listening at {bound}"
    port = split_address(bound, option="--bind")[1]
    other = hint_to_start_coordinator(join_address("HOST", port))
    return f"listening at {bound}, for this machine only; other machines need: {other}"


def join_lines(reachable: str, *, trust: Path | None = None) -> list[str]:
    """Write the commands for a coordinator that is reached at ``reachable``, a line each.

    Args:
        reachable: ``host:port``.
        trust: the coordinator's folder of keys, where it is not the one that commands look for.
    """
    nodes, train = (
        hint(*words, coordinator=reachable) for words in (("nodes",), ("train", "job.toml", "--out", "run"))
    )
    ask = [f"who is there, and a run:  {nodes}", f"                          {train}"]
    own = "a node that owns rows has --data FILE too; without it a node only computes"
    if is_encrypted():
        where = ["--trust", str(trust)] if trust else []
        made = hint("coordinator", "token", "NAME", "--save", "FILE", *where)
        with_file = hint("node", "--token-file", "FILE", coordinator=reachable)
        found = [f"certificates of commands: export {VARIABLE}={shlex.quote(str(trust / ADMIN))}"] if trust else []
        return [f"FILE for the node NAME:   {made}", f"the node, with its FILE:  {with_file}", own, *found, *ask]
    here = f"a node of this machine:   {hint('node', '--name', 'node-1', coordinator=reachable)}"
    there = f"a node of another one:    {hint('node', coordinator=reachable)}"
    return [*([here] if is_loopback(reachable) else [there, here]), own, *ask]

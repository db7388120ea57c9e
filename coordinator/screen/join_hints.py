"""Say where a coordinator listens, and with which commands nodes join it and jobs are trained on it."""

from __future__ import annotations

from ringtune.hints import hint, hint_to_start_coordinator
from ringtune.rpc.addresses import is_loopback, is_wildcard, join_address, split_address
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


def join_lines(reachable: str) -> list[str]:
    """Write the commands for a coordinator that is reached at ``reachable``, a line each."""
    token = ["--token-file", "FILE"] if is_encrypted() else []
    here = f"a node of this machine:   {hint('node', '--name', 'node-1', *token, coordinator=reachable)}"
    there = f"a node of another one:    {hint('node', *token, coordinator=reachable)}"
    places = [here] if is_loopback(reachable) else [there, here]
    made = hint("coordinator", "token", "NAME", "--save", "FILE")
    return [
        *([f"FILE for the node NAME:   {made}"] if token else []),
        *places,
        "a node that owns rows has --data FILE too; without it a node only computes",
        f"who is there, and a run:  {hint('nodes', coordinator=reachable)}",
        f"                          {hint('train', 'job.toml', '--out', 'run', coordinator=reachable)}",
    ]

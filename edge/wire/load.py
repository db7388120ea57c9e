"""Measure what messages take from a node's computing, while every node of a ring computes and sends.

Threads that send and receive, the kernel's work for each packet and the caches that both empty are paid by whatever
computes. No clock of a process shows all of that, so the loss itself is measured: how much less a node computes while
it sends to its successor and receives from its predecessor, for each byte of both::

    hashes  |##########|#######___|      first alone, then with messages: 30 % less for so many bytes

A node with a core to spare loses nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import grpc

from edge.wire.burner import Burner
from edge.wire.probe import RECEIVED, Probe, of_both, thoroughness
from ringtune.errors import RingTuneError
from ringtune.rpc.statuses import error_of_call
from ringtune.trust.parties import node_party

_SHARE_ALONE = 1 / 3


def computing_lost_s_per_byte(
    source: str, target: str, address: str, message_bytes: int, computing_s: float, *, timeout_s: float
) -> float:
    """Compute for some seconds, the last two thirds of them while messages go out and come in.

    Args:
        source: this node, for messages.
        target: the node to send to.
        address: its ``host:port``.
        message_bytes: of a hidden state.
        computing_s: how long, seconds; all nodes of the ring are asked at the same moment.
        timeout_s: for everything.

    Returns:
        Seconds of computing that each byte sent or received took.

    Raises:
        ConnectionFailedError: nobody answers there.
    """
    try:
        with contextlib.closing(
            Probe(
                address, message_bytes, timeout_s, thoroughness(brief=True), busy_target=False, peer=node_party(target)
            )
        ) as probe:
            probe.ping()
            probe.look()
            with Burner() as burner:
                alone = _rate(burner, lambda: time.sleep(_SHARE_ALONE * computing_s))
                before = probe.sent_bytes + RECEIVED.num_bytes
                started_s = time.monotonic()
                beside = _rate(burner, lambda: probe.keep_sending((1 - _SHARE_ALONE) * computing_s))
                taken_s = time.monotonic() - started_s
                num_bytes = probe.sent_bytes + RECEIVED.num_bytes - before
    except grpc.RpcError as error:
        raise of_both(error_of_call(error, peer=f"node {target} at {address}"), source, target) from error
    except RingTuneError as error:
        raise of_both(error, source, target) from error
    return max(0.0, 1 - beside / alone) * taken_s / num_bytes if num_bytes and alone else 0.0


def _rate(burner: Burner, work: Callable[[], object]) -> float:
    """Pieces a second that the burner hashed during ``work``."""
    pieces, started_s = burner.pieces, time.monotonic()
    work()
    return (burner.pieces - pieces) / (time.monotonic() - started_s)

"""What the payloads of a link are called: on the wire, in the engine's keys, and in words for people."""

from __future__ import annotations

from typing import Final

from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.exchanges.parcels import PARCELS
from ringtune.v1 import ring_pb2

PROBE: Final = "probe"
"""The kind of a blob that has no use but to measure a link."""

KINDS: Final[dict[str, ring_pb2.FrameKind]] = {
    Payload.HIDDEN.value: ring_pb2.FRAME_KIND_HIDDEN,
    Payload.GRAD.value: ring_pb2.FRAME_KIND_GRAD,
    Payload.HEAD.value: ring_pb2.FRAME_KIND_HEAD,
    Payload.UNIT_GRAD.value: ring_pb2.FRAME_KIND_UNIT_GRAD,
    Payload.PAIRS.value: ring_pb2.FRAME_KIND_PAIRS,
    Payload.WEIGHTS.value: ring_pb2.FRAME_KIND_WEIGHTS,
    Payload.REPLICA_GRAD.value: ring_pb2.FRAME_KIND_REPLICA_GRAD,
    PROBE: ring_pb2.FRAME_KIND_PROBE,
}
"""The wire's kind of every payload that a link carries."""

NAMES: Final = {number: name for name, number in KINDS.items()}
"""Inverse of ``KINDS``."""

BLOBS: Final = frozenset(KINDS[name] for name in (Payload.HEAD, PROBE, *PARCELS))
"""Kinds whose payload is a blob."""


def key_of(header: ring_pb2.FrameHeader) -> TensorKey:
    """Return the key of a header's payload; a head has its turn in place of the item."""
    name = NAMES[header.kind]
    if name in PARCELS:
        return TensorKey(name, header.seq, header.micro - 1, header.boundary - 1)
    return TensorKey(name, header.seq, header.micro, header.boundary)


def in_words(header: ring_pb2.FrameHeader) -> str:
    """Describe a payload in words, for errors: "the head for turn 3 from node a"."""
    kind = NAMES.get(header.kind, "")
    if kind == Payload.HEAD:
        return f"the head for turn {header.seq} from node {header.source}"
    if kind == Payload.UNIT_GRAD:
        unit = "head" if header.boundary else "embedding"
        return f"the gradient of the {unit} for item {header.seq} from node {header.source}"
    if kind == Payload.REPLICA_GRAD:
        return f"the gradients of item {header.seq} from block {header.boundary - 1} on, of replica {header.source}"
    if kind in PARCELS:
        what = {Payload.PAIRS: "pairs", Payload.WEIGHTS: "updated weights"}[Payload(kind)]
        key = key_of(header)
        micro = f", micro-batch {key.micro}" if key.micro >= 0 else ""
        return f"the {what} of item {key.seq}{micro}, block {key.boundary}, from node {header.source}"
    name = {Payload.HIDDEN.value: "hidden state", Payload.GRAD.value: "gradient"}.get(kind, kind or "payload")
    where = f"item {header.seq}, micro-batch {header.micro}, block {header.boundary}"
    return f"the {name} of {where}, from node {header.source}"

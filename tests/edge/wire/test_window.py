"""How far from the newest turn a frame may be: seldom senders and work that is granted ahead have to pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edge.wire import frames, tensors
from edge.wire.checks import FrameCheck, Newest
from ringtune.errors import FrameError
from ringtune.schedule.lowering import Payload
from ringtune.schedule.plan import Owner, Phase, Plan, Slice
from ringtune.schedule.turns import ITEMS_AHEAD, StepKind, items, turn_sequence
from ringtune.v1 import ring_pb2
from tests.support.wire_parts import expectation, hello, plan


def _tensor(of: Plan, source: str, payload: Payload, seq: int, boundary: int, rows: int) -> ring_pb2.FrameHeader:
    mask = torch.ones(rows, 3) if payload is Payload.HIDDEN and boundary < of.num_blocks else None
    encoded = tensors.encode(torch.zeros(rows, 3, of.hidden_size), mask, of.wire_dtype)
    return frames.tensor_header(hello(of, source), payload, seq, 0, boundary, encoded)


@pytest.mark.parametrize("eval_every", [0, 100])
def test_window_admits_heads_of_sources_that_send_nothing_else(eval_every: int) -> None:
    """Only after an evaluation a head goes from f to d, long after the run began: node d knows the turn by then."""
    owners = tuple(Owner(node=name, train_rows=8, eval_rows=4) for name in "cdef")
    of = plan(owners=owners, num_steps=300, local_iterations=2, eval_every=eval_every)
    newest = {owner.node: Newest() for owner in owners}
    checks: dict[tuple[str, str], FrameCheck] = {}

    def check_of(source: str, node: str) -> FrameCheck:
        key = (source, node)
        return checks.setdefault(key, FrameCheck(expectation(of, node), source, newest[node]))

    holder, heads = "c", 0
    for turn in turn_sequence(of):
        if turn.owner != holder:
            header = frames.blob_header(hello(of, holder), Payload.HEAD, turn.index, b"head")
            check_of(holder, turn.owner).admit(header)
            heads += 1
        holder = turn.owner
        for item in items(of, turn):
            rows = of.microbatch_sizes(item.rows)[0]
            check_of("b", holder).admit(_tensor(of, "b", Payload.HIDDEN, item.seq, of.num_blocks, rows))
            checks["b", holder].credit_returned(of.num_blocks, 1)
    assert heads > 140


def test_window_admits_what_was_granted_ahead() -> None:
    """With turns of one item, frozen work of many turns comes before the gradient of the first of them."""
    of = _ahead()
    check = FrameCheck(expectation(of, "b"), "a")
    last = -1
    for turn in turn_sequence(of):
        if turn.kind is StepKind.TRAIN and turn.index < ITEMS_AHEAD:
            check.admit(_tensor(of, "a", Payload.HIDDEN, turn.first_seq, 2, 4))
            check.credit_returned(2, 1)
            last = turn.index
    check.admit(_tensor(of, "a", Payload.GRAD, 0, of.num_blocks, 4))
    assert last == ITEMS_AHEAD - 1


def test_window_refuses_what_is_farther() -> None:
    """Beyond what can have been granted a frame is refused, so what a peer can make a node keep is bounded."""
    of = _ahead(num_steps=1000)
    check = FrameCheck(expectation(of, "b"), "a")
    with pytest.raises(FrameError, match="of no turn near turn 0"):
        check.admit(_tensor(of, "a", Payload.HIDDEN, 500, 2, 4))


def _ahead(**changes: Any) -> Plan:
    """One owner that hosts the lower half itself, one micro-batch a step, one step a turn."""
    values: dict[str, Any] = {
        "owners": (Owner(node="a", train_rows=8),),
        "phases": (Phase(slices=(Slice(node="a", start=0, stop=2), Slice(node="b", start=2, stop=4))),),
        "num_steps": 100,
        "local_iterations": 1,
        "every_steps": 1000,
        "microbatches": 1,
    }
    return plan(**{**values, **changes})

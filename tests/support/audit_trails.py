"""Trails of audited turns, written by hand, and the check of the ledger of a real run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from coordinator.api.audit import CheckedLedger, LedgerCheck, head_digests
from ringtune.models.family import CLASSIFICATION
from ringtune.models.result_files import HEAD_FILE
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn
from ringtune.techniques.audit import LEDGER, TAG_KEY, begin_name, end_names, state_digest, state_name, work_of
from tests.support.cluster import Outcome

Ends = Callable[[int], tuple[str, str]]
"""Digests of weights and optimizer state of a block."""


def trail_of(
    plan: Plan,
    turn: Turn,
    node: str,
    begin: Ends = lambda _: ("v", "q"),
    end: Ends = lambda _: ("w", "r"),
    head: str = "v",
) -> dict[str, str]:
    """Return a trail with the same digest for all tensors, and for all sums, from the last micro-batch to the first.

    The head does not change.
    """
    work = work_of(plan, turn, node)
    found = dict.fromkeys(sorted(work.peers), "t") | dict.fromkeys(sorted(work.sums, reverse=True), "s")
    if {*work.peers.values()} - {node}:
        found[TAG_KEY] = node
    if work.has_head:
        found |= {begin_name(plan.course.head): state_digest(head, "q")}
        found |= dict(zip(end_names(plan.course.head), (head, "q"), strict=True))
    found |= dict.fromkeys(sorted(work.fits, reverse=True), "s") | dict.fromkeys(work.held_names, "h")
    for block in plan.placement.trained_at(node):
        found[begin_name(block)] = state_digest(*begin(block))
        found |= {state_name(seq, block): state_digest(*end(block)) for seq in work.fitted.get(block, work.updates)}
        found |= dict(zip(end_names(block), end(block), strict=True))
    return found


def checked(outcome: Outcome, folder: Path) -> CheckedLedger:
    """Check the ledger of a run against its result, in a folder."""
    for name in (LEDGER, "adapter/adapter.safetensors", head := f"adapter/{HEAD_FILE}"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(outcome.files[name])
    check = LedgerCheck()
    assert outcome.plan is not None
    check.read(folder / LEDGER, LEDGER, plan=outcome.plan, adapters=["seq_bn"])
    check.compare(
        {"": folder / "adapter/adapter.safetensors"},
        steps=outcome.plan.course.num_steps,
        keeps_best=False,
        head=outcome.plan.course.head,
        heads=[head_digests(folder / head, CLASSIFICATION)],
    )
    return check.checked()

"""Rings with real tensors, rebuilt from the shards of a checkpoint, and what they have to equal in every bit."""

from __future__ import annotations

import random

import torch

from ringtune.run_control import events as rd
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import saves_head
from ringtune.schedule.turns import StartPoint
from ringtune.storage.pieces import Pieces
from tests.support.recorded_ring import RecordedResult, RecordedRing
from tests.support.torch_ring import Case, TorchCarrier, make_carrier, shard_metadata


def run(plan: Plan, carrier: TorchCarrier, seed: int, *, start: StartPoint | None = None) -> RecordedResult:
    """Run with random delays."""
    rng = random.Random(seed)
    return RecordedRing(
        plan,
        carrier=carrier,
        action_s=lambda node, action: rng.random(),
        message_s=lambda source, target, payload: rng.random(),
        control_s=lambda node: rng.random(),
        start=start,
    ).run()


def rebuilt(case: Case, plan: Plan, shards: dict[str, bytes], saved: rd.LogCheckpoint) -> TorchCarrier:
    """New executors that go on from the shards of a checkpoint."""
    carrier = make_carrier(case, plan)
    for node, executor in carrier.executors.items():
        with_head = saves_head(plan.course, node, saved.holder)
        executor.load_shard(Pieces.of(shards[node]), shard_metadata(node, saved.step), with_head=with_head)
    return carrier


def holder_of(plan: Plan, result: RecordedResult) -> str:
    """Who has the head at the end."""
    last = [entry for entry in result.logged if isinstance(entry, rd.LogTurn)][-1]
    return last.turn.owner


def same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors are equal in every bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)

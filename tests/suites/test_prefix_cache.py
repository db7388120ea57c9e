"""The prefix cache with real tensors: the bits of a run without it, and nobody computes below where a batch enters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ringtune.rounds import rounds as rd
from ringtune.schedule.actions import Op, Payload
from ringtune.schedule.passage import PrefixCache
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Turn
from sim.ring_result import RingResult
from tests.support.plans import changed
from tests.support.resumed import holder_of, run, same_bits
from tests.support.torch_ring import Case, TorchCarrier, make_carrier, write_inputs

Slices = tuple[tuple[str, int, int], ...]

SPLITS: dict[str, Slices] = {
    "one": (("a", 0, 4),),
    "two": (("b", 0, 1), ("a", 1, 4)),
    "four": (("d", 0, 1), ("c", 1, 2), ("b", 2, 3), ("a", 3, 4)),
    "owner hosts nothing": (("b", 0, 3), ("c", 3, 4)),
}
CACHE = PrefixCache(dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and few rows, so that they come again often."""
    return write_inputs(tmp_path_factory.mktemp("inputs"), num_rows=29)


def case_of(folder: Path, **changes: Any) -> Case:
    """64 steps in turns of four; the rows of two owners come again every eight steps."""
    settings = {"num_steps": 64, "every_steps": 28, "microbatches": 2, "dtype": "float32", "owners": ("a", "c")}
    return Case(folder=folder, **{**settings, **changes})


def with_cache(plan: Plan, cache: PrefixCache = CACHE) -> Plan:
    """The plan with a cache."""
    return changed(plan, cache=cache)


def carrier_of(case: Case, plan: Plan, folder: Path) -> TorchCarrier:
    """Nodes that keep hidden states in a folder each."""
    carrier = make_carrier(case, plan)
    for node, executor in carrier.executors.items():
        executor.prefixes.open(folder / node)
    return carrier


def ran(case: Case, plan: Plan, folder: Path, seed: int = 0) -> tuple[RingResult, TorchCarrier, dict[str, Any]]:
    """Run a plan with random delays; with all that was trained."""
    carrier = carrier_of(case, plan, folder)
    result = run(plan, carrier, seed)
    assert result.finish == rd.Finish("", ""), result.finish
    return result, carrier, carrier.collected(plan, holder_of(plan, result))


def turns_of(result: RingResult) -> list[Turn]:
    """The turns as they were granted."""
    return [entry.turn for entry in result.logged if isinstance(entry, rd.LogTurn)]


def counts(result: RingResult) -> Counter[Op]:
    """How often each op was carried out, on all nodes."""
    return Counter(action.op for actions in result.order.values() for action in actions)


@pytest.mark.parametrize("split", list(SPLITS))
@pytest.mark.parametrize("method", ["ringada", "all"])
def test_run_with_the_cache_has_the_bits_of_one_without(folder: Path, tmp_path: Path, split: str, method: str) -> None:
    """Unfreezing, evaluations, two owners; with everything trainable nothing is kept."""
    case = case_of(folder, method=method, eval_every=8)
    plain = case.plan(SPLITS[split])
    without, _, wanted = ran(case, plain, tmp_path / "without")
    result, carrier, found = ran(case, with_cache(plain), tmp_path / "with", seed=1)
    assert same_bits(found, wanted)
    losses = [[entry for entry in one.logged if isinstance(entry, rd.LogEvaluation)] for one in (without, result)]
    assert losses[0] == losses[1]
    reads = sum(executor.prefixes.reads for executor in carrier.executors.values())
    assert reads == counts(result)[Op.READ] and (reads > 0) == (method == "ringada")
    assert counts(result)[Op.EMBED] == counts(without)[Op.EMBED] - reads


def test_no_frame_passes_below_where_a_batch_enters(folder: Path, tmp_path: Path) -> None:
    """Micro-batches that enter at a boundary are sent over those above it only, and embedded nowhere."""
    case = case_of(folder)
    result, _, _ = ran(case, with_cache(case.plan(SPLITS["four"])), tmp_path)
    enters = {
        turn.first_seq + at: passage.enters for turn in turns_of(result) for at, passage in enumerate(turn.passages)
    }
    assert {boundary for boundary in enters.values() if boundary} == {1, 2, 3}
    sent = [
        (message.key.seq, message.key.boundary) for message in result.messages if message.key.payload == Payload.HIDDEN
    ]
    computed = [
        (action.seq, action.start)
        for actions in result.order.values()
        for action in actions
        if action.op in (Op.EMBED, Op.FORWARD, Op.FORWARD_FREE)
    ]
    assert all(boundary > enters.get(seq, 0) for seq, boundary in sent if enters.get(seq))
    assert all(start >= enters.get(seq, 0) for seq, start in computed if enters.get(seq))

"""The prefix cache with real tensors: the bits of a run without it, and nobody computes below where a batch enters."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.runtime.executor import NodeExecutor
from edge.techniques.activation_cache import ActivationCache, write_hidden
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Op, Payload
from ringtune.schedule.batches import num_batches
from ringtune.schedule.placement import ActivationCacheSettings
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, Turn
from ringtune.techniques.activation_cache import entry_bytes
from sim.ring import RingResult
from tests.support.plans import changed
from tests.support.resumed import holder_of, rebuilt, run, same_bits
from tests.support.torch_ring import Case, TorchCarrier, distance, make_carrier, write_inputs

Slices = tuple[tuple[str, int, int], ...]

SPLITS: dict[str, Slices] = {
    "one": (("a", 0, 4),),
    "two": (("b", 0, 1), ("a", 1, 4)),
    "four": (("d", 0, 1), ("c", 1, 2), ("b", 2, 3), ("a", 3, 4)),
    "owner hosts nothing": (("b", 0, 3), ("c", 3, 4)),
}
CACHE = ActivationCacheSettings(dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and few rows, so that they come again often."""
    return write_inputs(tmp_path_factory.mktemp("inputs"), num_rows=29)


def case_of(folder: Path, **changes: Any) -> Case:
    """48 steps in turns of four; the rows of two owners come again every eight steps."""
    settings = {"num_steps": 48, "every_steps": 20, "microbatches": 2, "dtype": "float32", "owners": ("a", "c")}
    return Case(folder=folder, **{**settings, **changes})


def with_cache(plan: Plan, cache: ActivationCacheSettings = CACHE) -> Plan:
    """The plan with a cache."""
    return changed(plan, cache=cache)


def carrier_of(case: Case, plan: Plan, folder: Path) -> TorchCarrier:
    """Nodes that keep hidden states in a folder each."""
    carrier = make_carrier(case, plan)
    for node, executor in carrier.executors.items():
        for technique in executor.techniques.values():
            technique.open(folder / node)
    return carrier


def cache_of(executor: NodeExecutor) -> ActivationCache:
    """What a node keeps."""
    cache = executor.techniques["activation_cache"]
    assert isinstance(cache, ActivationCache)
    return cache


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
@pytest.mark.sampled(1)
def test_run_with_the_cache_has_the_bits_of_one_without(folder: Path, tmp_path: Path, split: str, method: str) -> None:
    """Unfreezing, evaluations, two owners; with everything trainable nothing is kept."""
    case = case_of(folder, method=method, eval_every=8)
    plain = case.plan(SPLITS[split])
    without, _, wanted = ran(case, plain, tmp_path / "without")
    result, carrier, found = ran(case, with_cache(plain), tmp_path / "with", seed=1)
    assert same_bits(found, wanted)
    losses = [[entry for entry in one.logged if isinstance(entry, rd.LogEvaluation)] for one in (without, result)]
    assert losses[0] == losses[1]
    reads = sum(cache_of(executor).reads for executor in carrier.executors.values())
    assert reads == counts(result)[Op.READ] and (reads > 0) == (method == "ringada")
    assert counts(result)[Op.EMBED] == counts(without)[Op.EMBED] - reads


def test_no_frame_passes_below_where_a_batch_enters(folder: Path, tmp_path: Path) -> None:
    """Micro-batches that enter at a boundary are sent over those above it only, and embedded nowhere."""
    case = case_of(folder, num_steps=64, every_steps=28)
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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(1)
def test_any_run_with_the_cache_has_the_bits_of_one_without(folder: Path, tmp_path: Path, seed: int) -> None:
    """Private blocks, dropout, lossy wire, turns by rows, orders of unfreezing and slices are drawn."""
    rng = random.Random(seed)
    private = seed % 2
    cuts = sorted(rng.randint(private, 4) for _ in range(2))
    slices = (("b", private, cuts[0]), ("a", cuts[0], cuts[1]), ("c", cuts[1], 4))
    case = case_of(
        folder,
        owners=tuple(rng.sample("abcd", 2)),
        every_steps=rng.choice([12, 20]),
        microbatches=rng.choice([1, 3]),
        dropout=rng.choice([0.0, 0.2]),
        wire=rng.choice(["float32", "bfloat16", "int8"]),
        turns=rng.choice(["equal", "rows"]),
        eval_every=rng.choice([0, 16]),
        private_blocks=private,
    )
    plan = case.plan(slices)
    _, _, wanted = ran(case, plan, tmp_path / "without")
    result, _, found = ran(case, with_cache(plan), tmp_path / "with", seed)
    assert counts(result)[Op.READ] > 0
    assert same_bits(found, wanted)


@pytest.mark.thorough
def test_float64_is_kept_as_it_is_computed_and_bfloat16_rounds(folder: Path, tmp_path: Path) -> None:
    """The type of the computation gives the very bits; bfloat16 a result near it, from files of half the size."""
    case = case_of(folder, dtype="float64")
    plan = case.plan(SPLITS["two"])
    _, _, wanted = ran(case, plan, tmp_path / "without")
    _, exact, found = ran(case, with_cache(plan, ActivationCacheSettings(dtype="float64")), tmp_path / "exact")
    assert same_bits(found, wanted)
    _, rounded, near = ran(case, with_cache(plan, ActivationCacheSettings(dtype="bfloat16")), tmp_path / "rounded")
    assert 1e-9 < distance(near, wanted) < 0.2
    kept = [
        sum(cache_of(executor).max_held_bytes for executor in carrier.executors.values())
        for carrier in (exact, rounded)
    ]
    assert kept[1] < 0.3 * kept[0]


def max_held(carrier: TorchCarrier) -> int:
    """Bytes that all nodes kept at once, at most."""
    return sum(cache_of(executor).max_held_bytes for executor in carrier.executors.values())


def broken(path: Path) -> None:
    """Change a byte of a file's hidden state."""
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


def missing(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def short(path: Path) -> None:
    """Cut a file off."""
    path.write_bytes(path.read_bytes()[:70])


def a_folder(path: Path) -> None:
    """Put a folder in its place, which can't be deleted as a file."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [broken, missing, short, a_folder])
@pytest.mark.sampled(1)
def test_run_goes_on_without_what_was_damaged_and_says_so(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """A node looks through what may be read next before it reports a turn; the result has the same bits."""
    case = case_of(folder)
    plan = with_cache(case.plan(SPLITS["two"]))
    _, _, wanted = ran(case, plan, tmp_path / "whole")
    carrier = carrier_of(case, plan, tmp_path)
    after = {"turns": 0}
    end_turn = cache_of(carrier.executors["a"]).end_turn

    def damaging(index: int) -> str:
        after["turns"] += 1
        if after["turns"] == 2:  # nothing that was kept has been granted for reading yet
            damage(min((tmp_path / "a").iterdir()))
        return end_turn(index)

    cache_of(carrier.executors["a"]).end_turn = damaging  # type: ignore[method-assign]
    result = run(plan, carrier, 0)
    assert result.finish == rd.Finish("", "")
    lost = [entry for entry in result.logged if isinstance(entry, rd.LogTechniqueFailed)]
    assert [entry.node for entry in lost] == ["a"]
    assert "node a keeps no hidden states any more, the run goes on without: " in lost[0].problem
    assert str(tmp_path / "a") in lost[0].problem
    assert same_bits(carrier.collected(plan, holder_of(plan, result)), wanted)


@pytest.mark.parametrize("folder_is", ["full", "not there", "a file"])
@pytest.mark.thorough
def test_run_goes_on_where_a_node_can_keep_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder_is: str
) -> None:
    """No room on the disk, no folder, or a file in its place: the node says why, once, and others go on keeping."""
    case = case_of(folder, eval_every=8)
    plan = with_cache(case.plan(SPLITS["four"]))
    _, _, wanted = ran(case, plan, tmp_path / "whole")
    carrier = make_carrier(case, plan)
    for node, executor in carrier.executors.items():
        cache_of(executor).open(tmp_path / node)
    prefixes = cache_of(carrier.executors["b"])
    if folder_is == "not there":
        prefixes.open(None)
    elif folder_is == "a file":
        (tmp_path / "file").write_text("")
        prefixes.open(tmp_path / "file" / "hidden")
    else:
        monkeypatch.setattr("edge.techniques.activation_cache.write_hidden", without_room(tmp_path / "b"))
    result = run(plan, carrier, 0)
    assert result.finish == rd.Finish("", "")
    lost = [entry for entry in result.logged if isinstance(entry, rd.LogTechniqueFailed)]
    assert [entry.node for entry in lost] == ["b"]
    assert prefixes.reads == 0 and cache_of(carrier.executors["c"]).reads > 0
    assert same_bits(carrier.collected(plan, holder_of(plan, result)), wanted)


def without_room(folder: Path) -> Callable[..., int]:
    """Writing that fails in a folder, as on a full disk."""

    def write(path: Path, hidden: torch.Tensor, mask: torch.Tensor) -> int:
        if path.parent == folder:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_hidden(path, hidden, mask)

    return write


def test_resumed_run_begins_with_an_empty_cache(folder: Path, tmp_path: Path) -> None:
    """It reads nothing that was kept before, keeps anew, and ends with the bits of a whole run."""
    case = case_of(folder, checkpoint_every=16)
    plan = with_cache(case.plan(SPLITS["two"]))
    whole, carrier, wanted = ran(case, plan, tmp_path / "whole")
    saved = next(entry for entry in whole.logged if isinstance(entry, rd.LogCheckpoint))
    assert saved.step == 16
    again = rebuilt(case, plan, carrier.shards[saved.step], saved)
    start = StartPoint.of(plan.course, step=saved.step, holder=saved.holder)
    for node, executor in again.executors.items():
        cache_of(executor).open(tmp_path / "again" / node, start)
    result = run(plan, again, 1, start=start)
    assert result.finish == rd.Finish("", "")
    passages = [passage for turn in turns_of(result) for passage in turn.passages]
    assert passages[0].keeps and any(passage.enters for passage in passages)
    assert same_bits(again.collected(plan, holder_of(plan, result)), wanted)


def test_only_the_user_of_the_node_reads_what_it_keeps(folder: Path, tmp_path: Path) -> None:
    """Hidden states are of others' rows, so other users of the machine do not get at them."""
    carrier_of(case := case_of(folder), with_cache(case.plan(SPLITS["two"])), tmp_path / "state")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "state").iterdir()} == {0o700}


@pytest.mark.thorough
def test_replicas_keep_the_micro_batches_that_pass_them(folder: Path, tmp_path: Path) -> None:
    """Two hosts of the upper blocks: each keeps its own micro-batches, and the bits are those without a cache."""
    case = case_of(folder, microbatches=3)
    plan = case.plan((("a", 0, 1), ("b", 1, 4), ("c", 1, 4)))
    _, _, wanted = ran(case, plan, tmp_path / "without")
    _, carrier, found = ran(case, with_cache(plan), tmp_path / "with")
    reads = {node: cache_of(executor).reads for node, executor in carrier.executors.items()}
    assert reads["b"] == 2 * reads["c"] > 0
    assert same_bits(found, wanted)


def test_full_cache_keeps_no_more_than_its_limit(folder: Path, tmp_path: Path) -> None:
    """Room for two batches: no host holds more, and the others are embedded each time."""
    case = case_of(folder)
    plan = case.plan(SPLITS["two"])
    limit = 2 * entry_bytes(plan.course, with_cache(plan).placement, "a", 8)
    result, carrier, _ = ran(case, with_cache(plan, ActivationCacheSettings(max_bytes=limit)), tmp_path)
    held = [cache_of(executor).max_held_bytes for executor in carrier.executors.values()]
    assert 0 < max(held) <= limit
    assert 0 < counts(result)[Op.READ] < counts(result)[Op.EMBED]


@pytest.mark.thorough
def test_full_cache_makes_room_when_more_blocks_train(folder: Path, tmp_path: Path) -> None:
    """Room for all batches once: what nobody can read any more goes, and others are kept in its place."""
    case = case_of(folder, owners=("a",), num_steps=96, every_steps=32)
    plan = case.plan((("a", 0, 4),))
    _, _, wanted = ran(case, plan, tmp_path / "without")
    (owner,), rows = plan.course.owners, plan.course.batch_size
    limit = num_batches(owner.train_rows, rows) * entry_bytes(plan.course, with_cache(plan).placement, "a", rows)
    result, carrier, found = ran(case, with_cache(plan, ActivationCacheSettings(max_bytes=limit)), tmp_path / "with")
    last = [passage.enters for turn in turns_of(result) if turn.first_step >= 48 for passage in turn.passages]
    assert sum(boundary > 0 for boundary in last) > 16
    assert 0 < cache_of(carrier.executors["a"]).max_held_bytes <= limit
    assert same_bits(found, wanted)

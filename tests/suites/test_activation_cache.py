"""The activation cache with real tensors: nobody computes below where a batch enters, and a run goes on without it.

That a run with the cache has the bits of one without is among the laws.
"""

from __future__ import annotations

import dataclasses
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
from ringtune.schedule.placement import ActivationCacheSettings
from ringtune.schedule.plan import Plan
from ringtune.techniques.activation_cache import entry_bytes
from tests.features import plans
from tests.features.feature import Feature, Run, carry_out, run_of
from tests.features.memory import CACHE, open_caches
from tests.support.moves import granted
from tests.support.plans import changed
from tests.support.recorded_ring import RecordedResult
from tests.support.torch_ring import TorchCarrier, distance, make_carrier, same_bits

WITH = CACHE[0]
Prepare = Callable[[TorchCarrier, Path, Any], None]


def cache_of(executor: NodeExecutor) -> ActivationCache:
    """What a node keeps."""
    cache = executor.techniques["activation_cache"]
    assert isinstance(cache, ActivationCache)
    return cache


def feature_with(prepare: Prepare = open_caches, **changes: Any) -> Feature:
    """The cache in a run of other changes, or with nodes that are prepared otherwise."""
    return dataclasses.replace(WITH, changes={**WITH.changes, **changes}, prepare=prepare)


def counts(result: RecordedResult) -> Counter[Op]:
    """How often each op was carried out, on all nodes."""
    return Counter(action.op for actions in result.order.values() for action in actions)


def without_tensors(plan: Plan, **ring: Any) -> RecordedResult:
    """The same plan on the virtual clock alone."""
    return plans.run(plan, random.Random(0), **plans.SOON_KNOWN, **{"items_ahead": 2, **ring})


def most_kept(run: Run) -> dict[str, int]:
    """The most bytes that each node kept at once."""
    return {node: figures["cache_most_kept_bytes"] for node, figures in run.figures.items()}


def test_reads_take_the_place_of_embeddings() -> None:
    """With everything trainable nothing is kept."""
    run = run_of(WITH, "two")
    reads = sum(figures["cache_reads"] for figures in run.figures.values())
    assert 0 < reads == counts(run.result)[Op.READ]
    assert counts(run.result)[Op.EMBED] == counts(without_tensors(changed(run.plan, cache=None)))[Op.EMBED] - reads
    assert counts(without_tensors(feature_with(method="all").plan_on("two")))[Op.READ] == 0


def test_no_frame_passes_below_where_a_batch_enters() -> None:
    """Micro-batches that enter at a boundary are sent over those above it only, and embedded nowhere."""
    feature = feature_with(num_steps=18, eval_every=0)
    result = without_tensors(feature.plan_on("four"))
    turns = granted(result)
    enters = {turn.first_seq + at: passage.enters for turn in turns for at, passage in enumerate(turn.passages)}
    assert {boundary for boundary in enters.values() if boundary} == {1, 2, 3}
    sent = [message.key for message in result.messages if message.key.payload == Payload.HIDDEN]
    computed = [
        action
        for actions in result.order.values()
        for action in actions
        if action.op in (Op.EMBED, Op.FORWARD, Op.FORWARD_FREE)
    ]
    assert all(key.boundary > enters[key.seq] for key in sent if enters.get(key.seq))
    assert all(action.start >= enters[action.seq] for action in computed if enters.get(action.seq))


@pytest.mark.thorough
def test_bfloat16_rounds_and_takes_less() -> None:
    """A result near the exact one, from files of about a quarter of the size."""
    exact = run_of(WITH, "two")
    near = carry_out(WITH, changed(exact.plan, cache=ActivationCacheSettings(dtype="bfloat16")))
    assert 1e-9 < distance(near.tensors, exact.tensors) < 0.2
    assert sum(most_kept(near).values()) < 0.3 * sum(most_kept(exact).values())


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
def test_run_goes_on_without_what_was_damaged_and_says_so(damage: Callable[[Path], None]) -> None:
    """A node looks through what may be read next before it reports a turn; the result has the same bits."""
    folders: list[Path] = []

    def damaging(carrier: TorchCarrier, folder: Path, start: Any) -> None:
        open_caches(carrier, folder, start)
        folders.append(folder)
        cache = cache_of(carrier.executors["a"])
        end_turn = cache.end_turn

        def damaged(index: int) -> str:
            if len(folders) == 1:  # nothing that was kept has been granted for reading yet
                folders.append(min((folder / "a").iterdir()))
                damage(folders[1])
            return end_turn(index)

        cache.end_turn = damaged  # type: ignore[method-assign]

    run = carry_out(feature_with(damaging), WITH.plan_on("two"))
    (lost,) = run.logged(rd.LogTechniqueFailed)
    assert lost.node == "a"
    assert "node a keeps no hidden states any more, the run goes on without: " in lost.problem
    assert str(folders[0] / "a") in lost.problem
    assert same_bits(run.tensors, run_of(WITH, "two").tensors)


@pytest.mark.parametrize("folder_is", ["full", "not there", "a file"])
@pytest.mark.thorough
def test_run_goes_on_where_a_node_can_keep_nothing(monkeypatch: pytest.MonkeyPatch, folder_is: str) -> None:
    """No room on the disk, no folder, or a file in its place: the node says why, once, and others go on keeping."""

    def without(carrier: TorchCarrier, folder: Path, start: Any) -> None:
        open_caches(carrier, folder, start)
        if folder_is == "not there":
            cache_of(carrier.executors["b"]).open(None)
        elif folder_is == "a file":
            (folder / "file").write_text("")
            cache_of(carrier.executors["b"]).open(folder / "file" / "hidden")
        else:
            monkeypatch.setattr("edge.techniques.activation_cache.write_hidden", without_room(folder / "b"))

    changes: dict[str, Any] = {"num_steps": 24, "eval_every": 8}
    run = carry_out(feature_with(without, **changes), feature_with(**changes).plan_on("four"))
    assert [entry.node for entry in run.logged(rd.LogTechniqueFailed)] == ["b"]
    assert run.figures["b"]["cache_reads"] == 0 and run.figures["c"]["cache_reads"] > 0
    assert same_bits(run.tensors, run_of(feature_with(**changes), "four").tensors)


def without_room(folder: Path) -> Callable[..., int]:
    """Writing that fails in a folder, as on a full disk."""

    def write(path: Path, hidden: torch.Tensor, mask: torch.Tensor) -> int:
        if path.parent == folder:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_hidden(path, hidden, mask)

    return write


def test_resumed_run_begins_with_an_empty_cache() -> None:
    """It reads nothing that was kept before, and keeps anew."""
    plan = feature_with(checkpoint_every=2).plan_on("two")
    saved = next(entry for entry in without_tensors(plan).logged if isinstance(entry, rd.LogCheckpoint))
    rest = without_tensors(plan, start=plans.start_of(plan, saved))
    passages = [passage for turn in granted(rest) for passage in turn.passages]
    assert passages[0].keeps and any(passage.enters for passage in passages)


def test_only_the_user_of_the_node_reads_what_it_keeps(tmp_path: Path) -> None:
    """Hidden states are of others' rows, so other users of the machine do not get at them."""
    open_caches(make_carrier(WITH.case, WITH.plan_on("two")), tmp_path / "state", None)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "state").iterdir()} == {0o700}


@pytest.mark.thorough
def test_replicas_keep_the_micro_batches_that_pass_them() -> None:
    """Two hosts of the upper blocks: each keeps its own micro-batches, and the bits are those without a cache."""
    feature = feature_with(microbatches=3, num_steps=24)
    plan = feature.plan(feature.case, (("a", 0, 1), ("b", 1, 4, 1), ("c", 1, 4, 1)))
    run = carry_out(feature, plan)
    assert run.figures["b"]["cache_reads"] == 2 * run.figures["c"]["cache_reads"] > 0
    assert same_bits(run.tensors, carry_out(feature, changed(plan, cache=None)).tensors)


def test_full_cache_keeps_no_more_than_its_limit() -> None:
    """Room for one batch at each host: none holds more, and the others are embedded each time."""
    whole = run_of(WITH, "two")
    limit = entry_bytes(whole.plan.course, whole.plan.placement, "a", 8)
    run = carry_out(WITH, changed(whole.plan, cache=ActivationCacheSettings(dtype="float64", max_bytes=limit)))
    assert 0 <= max(most_kept(run).values()) <= limit < max(most_kept(whole).values())
    assert counts(run.result)[Op.READ] < counts(whole.result)[Op.READ]
    assert same_bits(run.tensors, whole.tensors)


@pytest.mark.thorough
def test_full_cache_makes_room_when_more_blocks_train() -> None:
    """Room for all batches once: what nobody can read any more goes, and others are kept in its place."""
    feature = feature_with(owners=("a",), num_steps=48, every_steps=16, eval_every=0)
    plan = feature.plan_on("one")
    (owner,), rows = plan.course.owners, plan.course.batch_size
    limit = -(-owner.train_rows // rows) * entry_bytes(plan.course, plan.placement, "a", rows)
    run = carry_out(feature, changed(plan, cache=ActivationCacheSettings(dtype="float64", max_bytes=limit)))
    turns = [entry.turn for entry in run.logged(rd.LogTurn)]
    last = [passage.enters for turn in turns if turn.first_step >= 24 for passage in turn.passages]
    assert sum(boundary > 0 for boundary in last) > 8
    assert 0 < most_kept(run)["a"] <= limit
    assert same_bits(run.tensors, carry_out(feature, changed(plan, cache=None)).tensors)

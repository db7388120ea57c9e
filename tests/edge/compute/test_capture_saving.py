"""Blocks that are run again give their pairs once, with the same bits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.compute.capturing.pairs import Pairs
from edge.compute.saving.block_forward import BlockForward
from edge.compute.saving.saved_blocks import run_saving
from ringtune.schedule.placement import Placement
from ringtune.schedule.units import Range, Units
from tests.support import offload
from tests.support.offload import NUM_BLOCKS, inputs_of, mask_of, task_of, trio
from tests.support.tiny_families import MODEL_TYPES

POLICIES = ((Range(0, 2),), (Range(0, 1),), (Range(1, 2),))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models are written."""
    return tmp_path_factory.mktemp("models")


@contextlib.contextmanager
def watched(both: offload.Trio, pairs: Pairs, start: int, stop: int) -> Iterator[None]:
    """What is open while the graph is made that the backward uses."""
    with both.host.capture.recording(pairs):
        yield


def taken(both: offload.Trio, recompute: tuple[Range, ...], order: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    """The pairs of two micro-batches whose backwards come in an order, with the gradients of their inputs."""
    *xs, first, second = inputs_of(both.host.skeleton.layout.model_type, 2)
    placement = Placement(slices=(), private_blocks=NUM_BLOCKS, recompute=recompute)
    flows: list[Any] = []
    for micro, x in enumerate(xs):
        pairs = both.host.capture.pairs()
        with torch.no_grad():
            context = both.host.runner.context(x, mask_of(x))
        forward = BlockForward(
            blocks=both.host.runner,
            mask=mask_of(x),
            context=context,
            trained=Units.of(NUM_BLOCKS, range(NUM_BLOCKS)),
            lowest=-1,
            train_at=(4, micro),
            patterns={},
            watched=functools.partial(watched, both, pairs),
            version=contextlib.nullcontext,
        )
        flows.append((run_saving(forward, x, 0, NUM_BLOCKS, placement)[0], pairs))
    found: dict[int, dict[str, torch.Tensor]] = {}
    for micro in order:
        saved, pairs = flows[micro]
        below = saved.backward((first, second)[micro])
        found[micro] = {**pairs.take(0, NUM_BLOCKS), "below": below}
        assert not list(pairs.tensors())
    return [found[micro] for micro in sorted(found)]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("recompute", POLICIES, ids=str)
@pytest.mark.sampled(7)
def test_blocks_that_run_again_give_the_same_pairs(root: Path, model_type: str, recompute: tuple[Range, ...]) -> None:
    """With dropout, and two micro-batches that come back in the other order; a pair that came twice is an error."""
    both = trio(
        offload.family_folder(root, model_type),
        "lora[r=2,alpha=6]|seq_bn[reduction_factor=8]",
        dropout=0.2,
        task=task_of(model_type),
    )
    kept, again = taken(both, (), (0, 1)), taken(both, recompute, (1, 0))
    for plain, other in zip(kept, again, strict=True):
        assert plain.keys() == other.keys()
        assert all(torch.equal(plain[name], other[name]) for name in plain)

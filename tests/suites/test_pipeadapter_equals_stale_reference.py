"""PipeAdapter in the ring against its rule written out: one process, the whole model, past versions of each block.

Host p of P, counted from below, keeps w = P - p items in flight: the forward of item k of a turn sees
``max(0, k - w + 1)`` updates of that turn, its backward the same weights, and its gradient goes to the newest ones.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call

from edge.data.rows import OwnerDataset
from ringtune import rounds as rd
from ringtune.learning_rate import learning_rate
from ringtune.turns import Item, StartPoint, StepKind, items, turn_sequence
from tests.edge.reference import inputs_of, targets_of, whole_model
from tests.suites.tensors import Case, distance, make_carrier, reference_of, write_family_inputs, write_inputs
from tests.suites.test_resumed_run_equals_the_whole import holder_of, rebuilt, same_bits
from tests.suites.test_resumed_run_equals_the_whole import run as run_plan
from tests.suites.test_ring_equals_one_process import distance_to_reference, run

Slices = tuple[tuple[str, int, int], ...]
Tensors = dict[str, torch.Tensor]

TWO: Slices = (("b", 0, 2), ("a", 2, 4))
THREE: Slices = (("a", 0, 1), ("b", 1, 3), ("c", 3, 4))
SPLITS = {"two": TWO, "three": THREE}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def stale_case(folder: Path, **changes: Any) -> Case:
    """Two owners, one of which hosts nothing in ``TWO``; three turns, the last one short."""
    values: dict[str, Any] = {"owners": ("a", "c"), "num_steps": 13, "local_iterations": 5, "microbatches": 2}
    return Case(folder=folder, method="pipeadapter", **{**values, **changes})


@dataclasses.dataclass
class StaleProcess:
    """The whole model, and for each block every version of its adapter that there ever was."""

    case: Case
    bounds: tuple[tuple[int, int], ...]
    losses: list[float] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        """Take the tensors out of the model; the modules are only called with others in their place."""
        case, plan = self.case, self.case.plan((("a", self.case.private_blocks, self.case.num_blocks),))
        self.model: Any = whole_model(case.job, plan, case.folder / "model").eval()
        self.model.heads[self.model.active_head].train()
        trained = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        self.head = {name: value for name, value in trained.items() if name.startswith("heads.")}
        self.blocks: list[dict[str, torch.nn.Parameter]] = []
        for _, block in self.model.iter_layers():
            own = {id(value) for value in block.parameters()}
            self.blocks.append({name: value for name, value in trained.items() if id(value) in own})
        for block in self.blocks[: case.private_blocks]:
            block.clear()
        self.past = [[self.copy(block)] for block in self.blocks]
        newest = [value for block in self.blocks for value in block.values()] + list(self.head.values())
        kind = torch.optim.AdamW if case.optimizer == "adamw" else torch.optim.SGD
        self.optimizer = kind(newest, lr=1.0, weight_decay=case.weight_decay)

    @staticmethod
    def copy(tensors: Any) -> Tensors:
        """Values of this moment."""
        return {name: value.detach().clone() for name, value in tensors.items()}

    def seen(self, block: int, first_step: int, k: int) -> Tensors:
        """The version of a block that the forward of item ``k`` of a turn sees."""
        above = [p for p, (_, stop) in enumerate(self.bounds) if stop > block]
        return self.past[block][first_step + max(0, k - len(above) + 1)] if self.blocks[block] else {}

    def train(self) -> StaleProcess:
        """All turns."""
        plan, datasets = self.case.plan((("a", self.case.private_blocks, self.case.num_blocks),)), self.case.datasets()
        for turn in turn_sequence(plan):
            if turn.kind is StepKind.TRAIN:
                for k, item in enumerate(items(plan, turn)):
                    self.step(item, turn.first_step, k, datasets[turn.owner])
        return self

    def step(self, item: Item, first_step: int, k: int, dataset: OwnerDataset) -> None:
        """One item: forward and backward with old versions, one update of the newest."""
        plan = self.case.plan((("a", self.case.private_blocks, self.case.num_blocks),))
        used = {name: value for b in range(len(self.blocks)) for name, value in self.seen(b, first_step, k).items()}
        used = {name: value.clone().requires_grad_() for name, value in {**used, **self.copy(self.head)}.items()}
        batch = dataset.batch(plan, item)
        _, all_targets = targets_of(self.case.task, batch)
        total, first = torch.zeros((), dtype=torch.float64), 0
        for size in plan.microbatch_sizes(item.rows):
            rows = batch.rows(first, first + size)
            first += size
            targets, count = targets_of(self.case.task, rows)
            output = functional_call(self.model, used, kwargs={**inputs_of(self.model, rows), **targets})
            total = total + output.loss * (count / all_targets)
        grads = dict(zip(used, torch.autograd.grad(total, list(used.values())), strict=True))
        for part in (*self.blocks, self.head):
            for name, value in part.items():
                value.grad = grads[name]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.case.job.train, item.step, plan.num_steps)
        self.optimizer.step()
        for block, versions in zip(self.blocks, self.past, strict=True):
            versions.append(self.copy(block))
        self.losses.append(float(total.detach()))

    def result(self) -> Tensors:
        """Adapters and head, named as the ring names them."""
        state = self.model.state_dict()
        names = [name for name in state if ".ringtune." in name]
        return {name: state[name] for name in names}


@functools.lru_cache(maxsize=32)
def stale_reference(case: Case, bounds: tuple[tuple[int, int], ...]) -> tuple[Tensors, list[float]]:
    """The result of the stale process, once per case."""
    generator_state = torch.get_rng_state()
    done = StaleProcess(case, bounds).train()
    torch.set_rng_state(generator_state)
    return done.result(), done.losses


def hosts_of(slices: Slices) -> tuple[tuple[int, int], ...]:
    """The hosts' ranges, bottom to top, without empty ones."""
    return tuple((start, stop) for _, start, stop in slices if stop > start)


def ring_result(case: Case, slices: Slices, *, seed: int = 0) -> tuple[Tensors, list[float], dict[str, dict[str, int]]]:
    """Adapters and head, losses of the steps, and the figures of the versions, after a run with random delays."""
    result, carrier = run(case, slices, seed=seed)
    plan = case.plan(slices)
    holder = [turn for turn in turn_sequence(plan) if turn.kind is StepKind.TRAIN][-1].owner
    steps = [entry for entry in result.logged if isinstance(entry, rd.LogStep) and entry.turn.kind is StepKind.TRAIN]
    losses = [dict(entry.values)["loss_sum"] / dict(entry.values)["count"] for entry in steps]
    figures = {node: executor.version_figures for node, executor in carrier.executors.items()}
    assert {executor.live_bytes() for executor in carrier.executors.values()} == {0}
    return carrier.collected(plan, holder), losses, figures


@pytest.mark.parametrize("split", list(SPLITS))
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_pipeadapter_equals_the_stale_reference(folder: Path, split: str, microbatches: int, optimizer: str) -> None:
    """Three turns of two owners: every tensor and every loss to 1e-9 in float64."""
    case = stale_case(folder, microbatches=microbatches, optimizer=optimizer)
    wanted, losses = stale_reference(case, hosts_of(SPLITS[split]))
    got, found, _ = ring_result(case, SPLITS[split])
    assert distance(got, wanted) < 1e-9
    assert found == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize(
    ("slices", "changes"),
    [
        ((("a", 0, 1), ("b", 1, 2), ("c", 2, 3), ("d", 3, 4)), {"local_iterations": 3, "eval_every": 6}),
        ((("d", 0, 1), ("b", 1, 1), ("c", 1, 3), ("e", 3, 4)), {"owners": ("b", "c")}),
        ((("b", 1, 2), ("a", 2, 3), ("d", 3, 4)), {"private_blocks": 1}),
        ((("a", 1, 2), ("c", 2, 4)), {"private_blocks": 1}),
    ],
    ids=["more-hosts-than-steps-of-a-turn", "empty-slice", "private-block", "private-block-joins-a-slice"],
)
def test_pipeadapter_of_other_shapes_equals_the_stale_reference(
    folder: Path, slices: Slices, changes: dict[str, Any]
) -> None:
    """Short turns, evaluations between them, owners anywhere, frozen private blocks: the same rule."""
    case = stale_case(folder, **changes)
    assert distance(ring_result(case, slices)[0], stale_reference(case, hosts_of(slices))[0]) < 1e-9


def test_pipeadapter_comparison_can_fail(folder: Path) -> None:
    """Negative control: one host more, or no staleness at all, is far outside the bound."""
    case = stale_case(folder)
    wanted, _ = stale_reference(case, hosts_of(THREE))
    assert distance(stale_reference(case, hosts_of(TWO))[0], wanted) > 1e-4
    fresh = reference_of(dataclasses.replace(case, method="all"))
    assert distance({**fresh.adapter(), **fresh.head()}, wanted) > 1e-4


@pytest.mark.parametrize("changes", [{"local_iterations": 1, "num_steps": 6}, {}], ids=["one-step-turns", "one-host"])
def test_pipeadapter_that_cannot_be_stale_equals_all(folder: Path, changes: dict[str, Any]) -> None:
    """Turns of one step, or one host: the result of one process that trains everything."""
    case = stale_case(folder, **changes)
    slices = THREE if changes else (("a", 0, 4),)
    assert distance_to_reference(case, slices, dataclasses.replace(case, method="all")) < 1e-9
    assert {figures["peak_versions"] for figures in ring_result(case, slices)[2].values()} <= {0, 1}


@pytest.mark.parametrize("seed", range(1, 5))
def test_pipeadapter_delays_never_change_a_bit(folder: Path, seed: int) -> None:
    """With dropout in float32, other delays give the very bits, and the very numbers of versions."""
    case = stale_case(folder, dtype="float32", dropout=0.1, num_steps=10)
    first, losses, figures = ring_result(case, THREE, seed=0)
    again, found, also = ring_result(case, THREE, seed=seed)
    assert same_bits(again, first)
    assert (found, also) == (losses, figures)


def test_pipeadapter_stores_as_many_versions_as_items_in_flight(folder: Path) -> None:
    """Hosts of three store 3, 2 and 1 versions; an owner without blocks has none."""
    case = stale_case(folder, owners=("a", "d"))
    figures = ring_result(case, THREE)[2]
    assert {node: found["peak_versions"] for node, found in figures.items()} == {"a": 3, "b": 2, "c": 1, "d": 0}
    # the slice of b is twice as large as that of a
    assert figures["a"]["peak_version_bytes"] == figures["b"]["peak_version_bytes"] > 0
    assert figures["c"]["peak_version_bytes"] == 0


def test_pipeadapter_other_methods_make_no_copy(folder: Path) -> None:
    """RingAda stores one version of everything, as the paper says."""
    case = Case(folder=folder, owners=("a", "c"), every_steps=2, num_steps=10, microbatches=2)
    figures = ring_result(case, THREE)[2]
    assert {found["peak_versions"] for found in figures.values()} == {1}
    assert {found["peak_version_bytes"] for found in figures.values()} == {0}


@pytest.mark.parametrize("adapter", ["lora[r=4]", "loreft"])
def test_pipeadapter_of_other_adapters_equals_the_stale_reference(
    tmp_path_factory: pytest.TempPathFactory, adapter: str
) -> None:
    """Versions are tensors put into modules, whatever the modules are; ReFT runs in float32 only."""
    inputs = write_family_inputs(tmp_path_factory.mktemp("family"), "bert", "sequence-classification")
    dtype = "float32" if adapter == "loreft" else "float64"
    case = stale_case(inputs, adapter=adapter, dtype=dtype, num_steps=8)
    got = ring_result(case, THREE)[0]
    wanted = stale_reference(case, hosts_of(THREE))[0]
    assert distance(got, wanted) < (1e-5 if dtype == "float32" else 1e-9)


def test_pipeadapter_resumed_run_gives_the_bits_of_the_whole_run(folder: Path) -> None:
    """Checkpoints see flushed weights, so a resumed run ends with the very bits."""
    case = stale_case(folder, checkpoint_every=3, eval_every=4, dropout=0.1)
    plan = case.plan(THREE)
    whole = make_carrier(case, plan)
    result = run_plan(plan, whole, 0)
    wanted = whole.collected(plan, holder_of(plan, result))
    saved = [entry for entry in result.logged if isinstance(entry, rd.LogCheckpoint)]
    assert [entry.step for entry in saved] == [5, 10, 13]
    for checkpoint in saved[:2]:
        start = StartPoint.of(plan, step=checkpoint.step, holder=checkpoint.holder)
        carrier = rebuilt(case, plan, whole.shards[checkpoint.step], checkpoint.step)
        rest = run_plan(plan, carrier, random.Random(checkpoint.step).randint(1, 99), start=start)
        assert rest.finish == rd.Finish("", "")
        assert same_bits(carrier.collected(plan, holder_of(plan, rest)), wanted)

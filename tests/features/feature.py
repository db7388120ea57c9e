"""A feature of a run as a value, and its runs on the virtual ring with real tensors, each made once a process.

A law (``tests/laws``) asks for the run of a feature on a split with delays of a seed, and looks at one side of it; the
next law that asks for the same run gets the same object. What is kept of a run is small: no model, no executor.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from edge.runtime.executor import NodeExecutor
from ringtune.run_control import events as rd
from ringtune.schedule.actions import Action, Op, TensorKey
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import saves_head
from ringtune.schedule.turns import StartPoint, StepKind, Turn, items
from ringtune.schedule.units import EMBEDDING, Units
from ringtune.schedule.versions import trained
from ringtune.storage.pieces import Pieces
from tests.features.plans import start_of
from tests.support import torch_ring
from tests.support.moves import Slices, slices_of
from tests.support.plans import changed
from tests.support.recorded_ring import RecordedResult, RecordedRing
from tests.support.tiny import write_rows
from tests.support.torch_ring import Case, TorchCarrier, make_executor, reference_of, shard_metadata

Tensors = dict[str, torch.Tensor]

ONE: Final[Slices] = (("a", 0, 4),)
TWO: Final[Slices] = (("b", 0, 1), ("a", 1, 4))
THREE: Final[Slices] = (("a", 0, 2), ("b", 2, 2), ("c", 2, 3), ("d", 3, 4))
FOUR: Final[Slices] = (("d", 0, 1), ("c", 1, 2), ("b", 2, 3), ("a", 3, 4))
EMPTY_OWNER: Final[Slices] = (("b", 0, 3), ("c", 3, 4))
SPLITS: Final[dict[str, Slices]] = {
    "one": ONE,
    "two": TWO,
    "three": THREE,
    "four": FOUR,
    "owner-hosts-nothing": EMPTY_OWNER,
}
PRIVATE: Final[dict[str, Slices]] = {
    "one": (("a", 1, 4),),
    "two": (("b", 1, 2), ("a", 2, 4)),
    "owners-host-nothing": (("b", 1, 3), ("d", 3, 4)),
}
"""Splits whose owners run block 0 themselves."""

_ROOT: Final = tempfile.TemporaryDirectory(prefix="ringtune-features-")
_NUMBERS: Final = itertools.count()


@functools.cache
def inputs(model_type: str = "", task: str = "", *, num_rows: int = 61, **config: Any) -> Path:
    """The folder of a family's tiny model and rows of a task; by default the smallest BERT with labelled texts."""
    folder = Path(_ROOT.name) / "-".join(map(str, ["inputs", model_type, task, num_rows, *config.values()]))
    if not model_type:
        torch_ring.write_inputs(folder, num_rows=num_rows)
        write_rows(folder / "eval.csv", 13, seed=2)  # a batch of each of two owners
        return folder
    return torch_ring.write_family_inputs(folder, model_type, task, **config)


def new_folder() -> Path:
    """A folder of its own, not yet made; it goes when the process ends."""
    return Path(_ROOT.name) / f"run-{next(_NUMBERS)}"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a run has to equal; None = the reference does not say.

    Attributes:
        tensors: all that trains.
        losses: of each step.
        evaluations: (loss_sum, count, correct) by step.
        tables: operation tables that the run chose.
    """

    tensors: Tensors
    losses: list[float] | None = None
    evaluations: dict[int, tuple[float, ...]] | None = None
    tables: list[rd.LogOperations] | None = None


def plan_of(case: Case, slices: Slices) -> Plan:
    """The plan of a case, also on stages of several hosts."""
    plan = case.plan((("a", case.private_blocks, case.num_blocks),))
    return changed(plan, slices=slices_of(slices))


def planned(**values: Any) -> Callable[[Case, Slices], Plan]:
    """A function that makes the plan of a case with some fields of its course or placement replaced."""
    return lambda case, slices: changed(plan_of(case, slices), **values)


def one_process(case: Case, run: Run) -> Wanted:
    """Plain transformers, adapters and autograd on the whole model."""
    found = reference_of(case)
    return Wanted(tensors=found.adapter() | found.head(), losses=found.losses, evaluations=dict(found.evaluations))


@dataclass(frozen=True, kw_only=True, eq=False)
class Feature:
    """A feature, or a variant of it.

    Attributes:
        name: ``GROUP/VARIANT``; of each group the gate draws a few variants, the same ones for all laws.
        changes: fields of the ``Case`` that turn it on.
        folder: makes the inputs.
        splits: slices by name.
        plan: makes the plan of the case on slices.
        reference: what a run has to equal.
        bound: the largest relative distance from it.
        tensors: all that trains, of a carrier, its plan and the owner that has the head; by default what nodes send.
        prepare: changes the executors before they run, with a folder of their own and the point where they begin.
        ring: further arguments of ``RecordedRing``.
        load: loads a result's folder into a plain model; None = its result has other tests.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    folder: Callable[[], Path] = inputs
    splits: dict[str, Slices] = field(default_factory=lambda: SPLITS)
    plan: Callable[[Case, Slices], Plan] = plan_of
    reference: Callable[[Case, Run], Wanted] = one_process
    bound: float = 1e-9
    tensors: Callable[[TorchCarrier, Plan, str], Tensors] = TorchCarrier.collected
    prepare: Callable[[TorchCarrier, Path, StartPoint | None], None] = lambda carrier, folder, start: None
    ring: Callable[[Plan, TorchCarrier], dict[str, Any]] = lambda plan, carrier: {}
    load: Callable[[Case, Path], Any] | None = None

    @property
    def group(self) -> str:
        """The part of the name that variants have in common."""
        return self.name.partition("/")[0]

    @property
    def technique(self) -> str:
        """The first word of the name."""
        return re.split("[-/]", self.name)[0]

    @property
    def number(self) -> int:
        """A number that depends on the name alone, to draw by."""
        return zlib.crc32(self.name.encode())

    @property
    def split(self) -> str:
        """The split of laws that need one only: another one in each variant."""
        return list(self.splits)[self.number % len(self.splits)]

    @functools.cached_property
    def case(self) -> Case:
        """Two owners in turns of two steps; one more block trains at each of four steps; a checkpoint at step 2."""
        values: dict[str, Any] = {"owners": ("a", "c"), "num_steps": 4, "every_steps": 1, "local_iterations": 2}
        values |= {"microbatches": 2, "eval_every": 4, "checkpoint_every": 2}
        return Case(folder=self.folder(), **{**values, **self.changes})

    def plan_on(self, split: str) -> Plan:
        """The plan on a split."""
        return self.plan(self.case, self.splits[split])


@dataclass
class Watched(TorchCarrier):
    """Notes what the laws look at.

    Attributes:
        units: of each item the units that train in it.
        too_low: (item, unit) of graphs that were kept below these units, and of gradients of others.
        dtypes: of the tensors that travelled.
        masks: (payload, boundary, values) of the masks that travelled.
    """

    units: dict[int, Units] = field(default_factory=dict)
    too_low: set[tuple[int, int]] = field(default_factory=set)
    dtypes: set[torch.dtype] = field(default_factory=set)
    masks: set[tuple[str, int, tuple[float, ...]]] = field(default_factory=set)

    def granted(self, node: str, turn: Turn) -> None:
        """Note what trains in the items of the turn."""
        super().granted(node, turn)
        assert self.plan is not None
        course = turn.settled(self.plan.course)
        self.units |= {item.seq: trained(course, item.kind, item.step) for item in items(course, turn)}

    def run(self, node: str, action: Action) -> tuple[tuple[str, float], ...]:
        """Look for graphs and gradients after an action."""
        values = super().run(node, action)
        executor = self.executors[node]
        for (seq, _), flow in executor._flows._flows.items():
            lowest = self.units[seq].lowest
            self.too_low.update((seq, start) for start, _ in flow.graphs if start < lowest)
        if action.op is Op.HEAD or action.op is Op.BACKWARD:
            units = self.units[action.seq]
            self.too_low.update((action.seq, unit) for unit in units_with_gradients(executor) if unit not in units)
        return values

    def put_head(self, node: str, content: Any) -> None:
        """Replace no weight of an open graph, which an invertible adapter's may be."""
        flows = self.executors[node]._flows._flows.values()
        assert not any(start == EMBEDDING for flow in flows for start, _ in flow.graphs), f"{node} has a graph"
        super().put_head(node, content)

    def take(self, node: str, key: TensorKey) -> Any:
        """Note what travels."""
        tensor, mask = content = super().take(node, key)
        self.dtypes.add(tensor.dtype)
        if mask is not None:
            self.masks.add((key.payload, key.boundary, tuple(mask.unique().tolist())))
        return content


def units_with_gradients(executor: NodeExecutor) -> set[int]:
    """The units of which some parameter has a gradient at this node."""
    hosted, piece = executor._hosted, executor._slice
    units = {
        index: list(hosted.blocks.parameters(index, index + 1).values()) for index in range(piece.start, piece.stop)
    }
    if hosted.owner is not None:
        units |= {unit: list(values.values()) for unit, values in hosted.owner.units.items()}
        units[EMBEDDING] += [stand_in for _, stand_in in hosted.owner._tied]
    return {unit for unit, values in units.items() if any(value.grad is not None for value in values)}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has ended.

    Attributes:
        feature: what was run.
        plan: of the run.
        result: what the ring says, without recordings of the engines.
        tensors: all that trains, at the end.
        files: what each node sent of the result, if something loads it.
        live_bytes: what each node holds at the end.
        figures: what each node says of its versions and techniques.
        notes: the carrier, without its executors.
    """

    feature: Feature
    plan: Plan
    result: RecordedResult
    tensors: Tensors
    files: dict[str, dict[str, bytes]]
    live_bytes: dict[str, int]
    figures: dict[str, dict[str, Any]]
    notes: Watched

    def logged(self, kind: type[Any]) -> list[Any]:
        """What was logged of a kind."""
        return [entry for entry in self.result.logged if isinstance(entry, kind)]

    @property
    def losses(self) -> list[float]:
        """The mean loss of each step."""
        steps = [entry for entry in self.logged(rd.LogStep) if entry.turn.kind is StepKind.TRAIN]
        values = [dict(entry.values) for entry in sorted(steps, key=lambda entry: int(entry.step))]
        return [each["loss_sum"] / each["count"] for each in values]

    @property
    def evaluations(self) -> dict[int, tuple[float, ...]]:
        """(loss_sum, count, correct) by step."""
        found = {entry.step: dict(entry.values) for entry in self.logged(rd.LogEvaluation)}
        return {step: (each["loss_sum"], each["count"], each.get("correct", 0.0)) for step, each in found.items()}


def carry_out(
    feature: Feature,
    plan: Plan,
    seed: int = 0,
    *,
    saved: rd.LogCheckpoint | None = None,
    shards: Mapping[str, bytes] | None = None,
    **ring: Any,
) -> Run:
    """Run a plan with random delays.

    Args:
        feature: what is run.
        plan: of the feature, changed or not.
        seed: of the delays.
        saved: where the run continues; by default it begins.
        shards: of that checkpoint; without, nodes continue with nothing that was trained.
        ring: further arguments of ``RecordedRing``.
    """
    part, start, rng = plan.parts[0], None if saved is None else start_of(plan, saved), random.Random(seed)
    for owner in plan.course.owners:
        feature.case.datasets()[owner.node].users = owner.users
    executors = {node: make_executor(feature.case, part, node) for node in part.nodes}
    carrier = Watched(executors, case=feature.case, plan=plan)
    feature.prepare(carrier, new_folder(), start)
    for node, shard in (shards or {}).items():
        assert saved is not None
        with_head = saves_head(plan.course, node, saved.holder)
        executors[node].load_shard(Pieces.of(shard), shard_metadata(node, saved.step), with_head=with_head)
    times: dict[str, Any] = {
        "action_s": lambda node, action: rng.random(),
        "message_s": lambda source, target, payload: rng.choice([0.0, 0.1, 2.0]) * rng.random(),
        "control_s": lambda node: rng.random(),
        "move_s": lambda move: rng.random(),
    }
    result = RecordedRing(plan, carrier=carrier, start=start, **{**times, **feature.ring(plan, carrier), **ring}).run()
    assert result.finish is not None
    assert result.finish.error == ("InterruptedRunError" if "drain_at_s" in ring else ""), result.finish
    result.handled.clear()
    result.spans.clear()
    return ended(feature, plan, carrier, result)


def ended(feature: Feature, plan: Plan, carrier: Watched, result: RecordedResult) -> Run:
    """What is kept of a run."""
    last = [entry.part for entry in result.logged if isinstance(entry, rd.LogMove)][-1:] or [plan.parts[0]]
    turns = [entry.turn for entry in result.logged if isinstance(entry, rd.LogTurn)]
    holder = turns[-1].owner if turns else StartPoint.of(plan.course).holder  # none is through if it was drained before
    found = feature.tensors(carrier, last[0], holder)
    return Run(
        feature=feature,
        plan=plan,
        result=result,
        tensors={name: value.detach().clone() for name, value in found.items()},
        files=files_of(carrier, last[0], holder) if feature.load is not None else {},
        live_bytes={node: executor.live_bytes() for node, executor in carrier.executors.items()},
        figures={node: executor.run_figures for node, executor in carrier.executors.items()},
        notes=dataclasses.replace(carrier, executors={}, snapshots={}, kept={}),
    )


def files_of(carrier: TorchCarrier, plan: Plan, holder: str) -> dict[str, dict[str, bytes]]:
    """What each node sends of the result."""
    private = plan.placement.private_blocks > 0
    return {
        node: {name: bytes(content) for name, content in files.items()}
        for node, executor in carrier.executors.items()
        for files in [executor.adapter_files(with_head=node == holder, with_private=node == holder and private)]
    }


@functools.lru_cache(maxsize=128)
def run_of(feature: Feature, split: str) -> Run:
    """The run of a feature on a split; what was run once is not run again."""
    return carry_out(feature, feature.plan_on(split))


def on_one_node(case: Case, run: Run) -> Wanted:
    """The run of the same course on one node, for what no plain loop is written; its first table chooses something."""
    slices: Slices = (("a", run.plan.placement.private_blocks, run.plan.course.num_blocks),)
    one = carry_out(run.feature, changed(run.plan, slices=slices))
    tables = one.logged(rd.LogOperations)
    assert all(len(set("".join(table.operations.batches[0].rows))) > 1 for table in tables[:1]), "nothing was chosen"
    return Wanted(tensors=one.tensors, tables=tables)


@functools.lru_cache(maxsize=128)
def wanted_of(feature: Feature, split: str) -> Wanted:
    """What the run of a feature on a split has to equal."""
    return feature.reference(feature.case, run_of(feature, split))


def each(features: Iterable[Feature], counts: Mapping[str, int] | None = None) -> pytest.MarkDecorator:
    """Parametrize a law by features; the gate has so many variants of each group, by default one.

    Laws of the same features draw the same variants, so that the gate carries each run out once.
    """
    return pytest.mark.parametrize("feature", _cases(features, lambda feature: feature.group, counts or {}))


def each_technique(features: Iterable[Feature]) -> pytest.MarkDecorator:
    """Parametrize a law that needs runs of its own; the gate has one variant of all groups of a technique."""
    return pytest.mark.parametrize("feature", _cases(features, lambda feature: feature.technique, {}))


def each_split(features: Iterable[Feature], counts: Mapping[str, int] | None = None) -> pytest.MarkDecorator:
    """Parametrize a law by features and all their splits; of those that the gate has it carries one split out."""
    cases = [
        pytest.param(
            feature, split, id=f"{feature.name}-{split}", marks=case.marks or _thorough(split != feature.split)
        )
        for case in _cases(features, lambda feature: feature.group, counts or {})
        for feature in case.values
        for split in feature.splits
    ]
    return pytest.mark.parametrize(("feature", "split"), cases)


def _cases(features: Iterable[Feature], group: Callable[[Feature], str], counts: Mapping[str, int]) -> list[Any]:
    variants: dict[str, list[Feature]] = {}
    for feature in sorted(features, key=lambda feature: feature.number):
        variants.setdefault(group(feature), []).append(feature)
    return [
        pytest.param(feature, id=feature.name, marks=_thorough(at >= counts.get(name, 1)))
        for name, group_variants in variants.items()
        for at, feature in enumerate(group_variants)
    ]


def _thorough(is_thorough: bool) -> Any:
    return pytest.mark.thorough if is_thorough else ()

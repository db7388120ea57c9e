"""A run that is rebuilt from the shards of a checkpoint ends with the very bits of the uninterrupted one."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from edge.agent.torch_backend import load_migrated
from edge.checkpoint.shard_file import MERGED
from edge.checkpoint.snapshots import MigratedState, metadata
from edge.checkpoint.state_folder import RunShards
from ringtune.errors import IntegrityError
from ringtune.run_control import events as rd
from ringtune.run_control.checkpoint import CheckpointHolders, CheckpointManifest, Shard
from ringtune.schedule.migration import with_owner, without_owner
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import saves_head
from ringtune.schedule.turns import StepKind
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile, write_tensors
from tests.features.catalog import ALL
from tests.features.feature import Feature, Run, carry_out, each, each_technique, run_of
from tests.features.full_parameters import HIFT
from tests.features.methods import DRAWN, LEFT_OUT, PIPEADAPTER, SHAPE
from tests.features.models import INVERTIBLE
from tests.features.offload import USERS_WITHOUT_BLOCKS, WITH_HELPERS
from tests.support.hift_reference import tensors_of, train_hift
from tests.support.moves import with_slices
from tests.support.reference import turns_as_written
from tests.support.torch_ring import TorchCarrier, distance, same_bits

RUN = "r20260101-000000-00000000"
CHECKPOINTS = [feature for feature in ALL if feature.changes.get("checkpoint_every", 4)]


def continued(run: Run, saved: rd.LogCheckpoint, *, seed: int = 2) -> Run:
    """The rest of a run from one of its checkpoints."""
    return carry_out(run.feature, run.plan, seed, saved=saved, shards=run.notes.shards[saved.step])


@each_technique(CHECKPOINTS)
def test_resumed_run_equals_the_whole(feature: Feature) -> None:
    """What trains, evaluations and later checkpoints."""
    run = run_of(feature, feature.split)
    saved = run.logged(rd.LogCheckpoint)[0]
    assert 0 < saved.step < feature.case.num_steps
    rest = continued(run, saved)
    assert same_bits(rest.tensors, run.tensors)
    assert rest.losses == run.losses[saved.step :]
    assert rest.evaluations == {step: run.evaluations[step] for step in rest.evaluations}
    assert rest.notes.shards == {step: shards for step, shards in run.notes.shards.items() if step > saved.step}
    assert list(rest.logged(rd.LogOperations)) == [
        entry for entry in run.logged(rd.LogOperations) if entry.step >= saved.step
    ]


def placed_anew(run: Run, saved: rd.LogCheckpoint) -> Feature:
    """The feature on executors that take over what the disks of other nodes have of a run's checkpoint."""
    plan, step = run.plan, saved.step

    def prepare(carrier: TorchCarrier, folder: Path, start: Any) -> None:
        run.feature.prepare(carrier, folder, start)
        disks = {node: RunShards(folder / f"disk-{node}", node) for node in plan.nodes}
        shards = [
            RunShards(folder / f"disk-{node}", node).write(step, Pieces.of(run.notes.shards[step][node]))
            for node in plan.nodes
        ]
        manifest = CheckpointManifest(
            run_id=RUN,
            plan_digest=plan.digest,
            job_digest="",
            model_digest="",
            step=step,
            holder=saved.holder,
            shards=tuple(Shard(node=one.node, sha256=one.sha256, size_bytes=one.size_bytes) for one in shards),
            unfreezing=saved.unfreezing,
            operations=saved.operations,
        )
        intact = {node: {step: ""} for node in plan.nodes}
        where, owners = CheckpointHolders(manifest, plan.course, plan.placement, {}, intact), [*disks]
        for node, executor in carrier.executors.items():
            assert carrier.plan is not None
            files = [
                disks[source.node].part(step, RUN, source.start, source.stop, sha256=source.sha256)
                for source in where.sources(carrier.plan.placement, node)
            ]
            head = where.head_for(node, owners) if saves_head(carrier.plan.course, node, saved.holder) else None
            content = disks[head[0]].head(step, RUN, sha256=head[1]) if head else None
            load_migrated(executor, MigratedState(tuple(files), metadata(RUN, step), content, RUN))

    return dataclasses.replace(run.feature, prepare=prepare)


@pytest.mark.promise("1 partition invariance")
@each_technique([*SHAPE, *LEFT_OUT, *HIFT, *INVERTIBLE, *WITH_HELPERS, *USERS_WITHOUT_BLOCKS])
def test_run_resumed_in_another_placement_equals_the_whole(feature: Feature) -> None:
    """Blocks come from the shards of the nodes that trained them, embedding and head from those of an owner."""
    run = run_of(feature, feature.split)
    saved = run.logged(rd.LogCheckpoint)[0]
    rng, first, stop = random.Random(feature.name), feature.case.private_blocks, feature.case.num_blocks
    (low, high), cut = rng.sample(("a", "b", "c", "e"), 2), rng.randint(first, stop)
    other = ((low, first, cut), (high, cut, stop))
    plan = feature.plan(feature.case, other) if not run.plan.placement.helpers else run.plan
    placement = with_slices(rng, plan, other, ("a", "c", "e"))
    rest = carry_out(placed_anew(run, saved), Plan(plan.course, (placement,)), 2, saved=saved)
    assert distance(rest.tensors, run.tensors) < 1e-9
    assert rest.losses == pytest.approx(run.losses[saved.step :], rel=1e-9)


TAKING_BACK = [
    one
    for one in HIFT
    if len(one.changes["owners"]) > 1 and not one.changes.get("private_blocks") and one.name not in ("hift/velora",)
]
"""Those with a plain reference of other turns than the plan's."""


@pytest.mark.promise("1 partition invariance")
@each_technique(TAKING_BACK)
def test_run_of_all_parameters_that_takes_an_owner_back_equals_one_process(feature: Feature) -> None:
    """Any owner, with nothing on its disk: embedding, head and their moments are those of another owner's shard."""
    case, plan, rng = feature.case, feature.plan_on(feature.split), random.Random(feature.name)
    owner = rng.choice(case.owners)
    before = Plan(without_owner(plan.course, owner, 0), plan.placements)
    run = carry_out(feature, before)
    saved = run.logged(rd.LogCheckpoint)[0]
    course = with_owner(before.course, owner, before.course.turns_of(saved.step), case.num_steps)
    after = Plan(course, plan.placements)
    rest = carry_out(placed_anew(run, saved), after, 2, saved=saved)
    assert owner in {entry.turn.owner for entry in rest.logged(rd.LogTurn) if entry.turn.kind is StepKind.TRAIN}
    turns = turns_as_written(plan, [(0, before), (saved.step, after)])
    found = train_hift(case.job, plan, case.folder / "model", case.datasets(), turns=turns)
    wanted = tensors_of(found.model)
    assert distance(rest.tensors, {name: wanted[name] for name in rest.tensors}) < feature.bound
    assert [*run.losses[: saved.step], *rest.losses] == pytest.approx(found.losses, rel=feature.bound)


def without_sums(shard: bytes) -> bytes:
    """A shard as it was before helpers saved the sums of users in collaboration."""
    file = TensorFile(Pieces.of(shard), where="a shard")
    kept = {name: file.tensor(name) for name in file.infos if not name.startswith(MERGED)}
    return bytes(write_tensors(kept, metadata=file.metadata))


def test_run_of_users_without_their_sums_is_resumed_on_its_own_nodes_alone() -> None:
    """Hosts load the sums, which helpers' shards of earlier versions lack: the error names block and remedy."""
    feature = next(one for one in WITH_HELPERS if one.name.startswith("users-together"))
    run = run_of(feature, feature.split)
    saved = run.logged(rd.LogCheckpoint)[0]
    shards = {node: without_sums(shard) for node, shard in run.notes.shards[saved.step].items()}
    earlier = dataclasses.replace(run, notes=dataclasses.replace(run.notes, shards={saved.step: shards}))
    slices = (("b", 0, 2), ("c", 2, 4))
    placement = with_slices(random.Random(0), run.plan, slices, ("a", "c", "e"))
    with pytest.raises(IntegrityError, match=r"have no sum of .* of block 0, .*; resume the run on its own nodes"):
        carry_out(placed_anew(earlier, saved), Plan(run.plan.course, (placement,)), 2, saved=saved)
    assert same_bits(continued(earlier, saved).tensors, run.tensors)


def test_comparison_of_a_resumed_run_can_fail() -> None:
    """Negative control: nodes that load no shard end with other weights."""
    run = run_of(DRAWN, DRAWN.split)
    fresh = carry_out(DRAWN, run.plan, saved=run.logged(rd.LogCheckpoint)[0])
    assert not same_bits(fresh.tensors, run.tensors)


@pytest.mark.parametrize("drain_at_s", [5.0, pytest.param(2.0, marks=pytest.mark.thorough)])
@each_technique([*SHAPE, *HIFT, *PIPEADAPTER])
def test_drained_run_goes_on_with_the_same_bits(feature: Feature, drain_at_s: float) -> None:
    """Ctrl-C at any moment: the rest gives what the whole run gives; before the first turn is through, it is all."""
    run = run_of(feature, feature.split)
    stopped = carry_out(feature, run.plan, 3, drain_at_s=drain_at_s, items_ahead=2)
    saved = next(reversed(stopped.logged(rd.LogCheckpoint)), None)
    assert (saved is None) == (not stopped.logged(rd.LogTurn))
    assert saved.step < feature.case.num_steps if saved else drain_at_s == 2.0
    rest = carry_out(feature, run.plan, 4, saved=saved, shards=stopped.notes.shards[saved.step] if saved else None)
    assert same_bits(rest.tensors, run.tensors)


@each(SHAPE)
def test_run_that_is_made_longer_equals_the_longer_run(feature: Feature) -> None:
    """From the checkpoint at its end: as if it had had two steps more from the start."""
    steps, values = (
        2 * feature.case.local_iterations,
        {"lr_schedule": "constant", "eval_every": 0, "checkpoint_every": 0},
    )
    first = dataclasses.replace(
        feature, changes=feature.changes | values | {"num_steps": steps, "checkpoint_every": steps}
    )
    longer = dataclasses.replace(feature, changes=feature.changes | values | {"num_steps": steps + 2})
    short = carry_out(first, first.plan_on(feature.split))
    saved = short.logged(rd.LogCheckpoint)[-1]
    assert saved.step == steps
    plan = longer.plan_on(feature.split)
    whole = carry_out(longer, plan)
    rest = carry_out(longer, plan, 1, saved=saved, shards=short.notes.shards[steps])
    assert same_bits(rest.tensors, whole.tensors)

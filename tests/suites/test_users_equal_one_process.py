"""Users with adapters of their own train what a plain loop with a set for each of them trains.

The references (``tests.support.users_reference``) are whole models with autograd: copies of every layer for users that
train alone, one matrix with the sum of all changes for users that collaborate.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from ringtune.run_control import events as rd
from ringtune.schedule.course import ALONE, COLLABORATION, FrozenWeights, HelperSettings
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner, UserRows
from ringtune.schedule.turns import StartPoint, turn_sequence
from ringtune.schedule.units import Range
from ringtune.techniques.offload import helped
from tests.support import reference, resumed, users_reference
from tests.support.torch_ring import Case, TorchCarrier, distance, make_carrier, write_family_inputs, write_inputs

LORA_AND_LINEAR = "lora[r=4,alpha=4,attn_matrices=['q']]|linear[attn_matrices=['v']]"
SLICES = (("a", 0, 2), ("b", 2, 3), ("c", 3, 4))
TOGETHER: dict[str, Any] = {"users": COLLABORATION, "merged": True}
USERS = ("anna/", "ben/", "c/")
HELPERS = {"a": "z", "b": "a", "c": "z"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def case_of(folder: Path, **changes: Any) -> Case:
    """Two owners; the rows of the first are of two users, so that its batches mix them."""
    values = {"method": "all", "num_steps": 10, "local_iterations": 2, "microbatches": 2, "owners": ("a", "c")}
    return Case(folder=folder, **{**values, **changes})


def plan_of(case: Case, *, slices: tuple[tuple[str, int, int], ...] = SLICES, **manner: Any) -> Plan:
    """The case's plan with two users at the first owner, and helpers for every block."""
    plan = case.plan(slices)
    first, second = plan.course.owners
    users = (
        UserRows(name="anna", train_rows=first.train_rows // 3, eval_rows=first.eval_rows),
        UserRows(name="ben", train_rows=first.train_rows - first.train_rows // 3),
    )
    case.datasets()["a"].users = users
    mixed = Owner(node="a", train_rows=first.train_rows, eval_rows=first.eval_rows, users=users)
    course = dataclasses.replace(plan.course, owners=(mixed, second))
    return helped(Plan(course, plan.placements), HELPERS, HelperSettings(**manner))


def run(plan: Plan, carrier: TorchCarrier, seed: int = 1) -> TorchCarrier:
    """Run it to its end, with random delays."""
    assert resumed.run(plan, carrier, seed).finish == rd.Finish("", "")
    return carrier


def sets_at_hosts(carrier: TorchCarrier) -> dict[str, torch.Tensor]:
    """All users' adapters, as the hosts of the blocks have them."""
    found: dict[str, torch.Tensor] = {}
    for executor in carrier.executors.values():
        found |= executor.offloading.installed if executor.offloading.is_host else {}
    return {name: value.detach().clone() for name, value in found.items()}


def sets_at_helpers(carrier: TorchCarrier) -> dict[str, torch.Tensor]:
    """All users' adapters, as the helpers have them."""
    return {
        name: value.detach()
        for executor in carrier.executors.values()
        for models in executor._hosted.helped
        for name, value in models.parameters(models.units.start, models.units.stop).items()
    }


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("adapter", ["seq_bn", LORA_AND_LINEAR, "mlp[hidden=8,alpha=2.0]"])
@pytest.mark.sampled(1)
def test_users_alone_train_what_copies_of_the_layers_train(folder: Path, adapter: str, dropout: float) -> None:
    """Each row goes through its user's adapters, forward and back; moments and counts are the user's own."""
    case = case_of(folder, adapter=adapter, dropout=dropout)
    plan = plan_of(case, users=ALONE)
    carrier = run(plan, make_carrier(case, plan))
    theirs, head = users_reference.alone(case, plan)
    assert distance(sets_at_hosts(carrier), theirs) < 1e-9
    assert resumed.same_bits(sets_at_hosts(carrier), sets_at_helpers(carrier))
    assert distance(head_of(plan, carrier), head) < 1e-9
    apart = [
        {name.partition("/")[2]: value for name, value in theirs.items() if name.startswith(user)} for user in USERS
    ]
    assert min(distance(one, other) for one, other in itertools.combinations(apart, 2)) > 0.01


def head_of(plan: Plan, carrier: TorchCarrier) -> dict[str, torch.Tensor]:
    """The head of the owner that had it last."""
    owner = carrier.executors[list(turn_sequence(plan.course))[-1].owner]._hosted.owner
    assert owner is not None
    named = owner.head.named_parameters()
    return {f"heads.{reference.NAME}.{name}": value.detach() for name, value in named}


@pytest.mark.parametrize("interval", [3, 4])
@pytest.mark.sampled(1)
def test_users_alone_with_an_interval_are_updated_by_their_sums(folder: Path, interval: int) -> None:
    """Who has no row in an interval is not updated by it."""
    case = case_of(folder, adapter="lora[r=4]", dropout=0.1)
    plan = plan_of(case, users=ALONE, interval=interval)
    theirs, _ = users_reference.alone(case, plan, interval=interval)
    assert distance(sets_at_hosts(run(plan, make_carrier(case, plan))), theirs) < 1e-9


@pytest.mark.thorough
def test_users_alone_with_recomputed_blocks_train_the_same_bits(folder: Path) -> None:
    """A block that is run again is run with the adapters of the same user, for the same rows."""
    case = case_of(folder, adapter="lora[r=4]", dropout=0.1)
    plan = plan_of(case, users=ALONE)
    again = Plan(plan.course, (dataclasses.replace(plan.placement, recompute=(Range(0, 1), Range(2, 4))),))
    first, second = (sets_at_hosts(run(one, make_carrier(case, one), seed)) for seed, one in enumerate((plan, again)))
    assert resumed.same_bits(first, second)


@pytest.mark.parametrize("adapter", ["linear", "lora[r=4,alpha=16]", "lora[r=8,alpha=16]", LORA_AND_LINEAR])
@pytest.mark.sampled(1)
def test_users_in_collaboration_train_what_a_matrix_of_the_sum_trains(
    folder: Path, tmp_path: Path, adapter: str
) -> None:
    """Every row goes through the sum of all users' changes; a user's own change gets the gradient of own rows."""
    case = case_of(folder, adapter=adapter)
    plan = plan_of(case, users=COLLABORATION, merged=True)
    carrier = make_carrier(case, plan)
    for node, executor in carrier.executors.items():
        executor.offloading.keep_on_disk(tmp_path / node, {"node": node})
    run(plan, carrier)
    assert distance(sets_at_helpers(carrier), users_reference.together(case, plan)) < 1e-9
    assert not any("anna" in name for name in sets_at_hosts(carrier))


@pytest.mark.parametrize("manner", [{"users": ALONE}, {"users": COLLABORATION, "merged": True}])
def test_users_results_are_their_sets(folder: Path, manner: dict[str, Any]) -> None:
    """The nodes' parts together have each tensor of each user once, and the head once."""
    case = case_of(folder, adapter="lora[r=4]", num_steps=4)
    plan = plan_of(case, **manner)
    carrier = run(plan, make_carrier(case, plan))
    holder = list(turn_sequence(plan.course))[-1].owner
    found: dict[str, torch.Tensor] = {}
    for node, executor in carrier.executors.items():
        for name, content in executor.adapter_files(with_head=node == holder).items():
            if name.endswith("/adapter.safetensors"):
                user = name.split("/")[1]
                tensors = {f"{user}/{key.split('.layer.')[1]}": value for key, value in load(bytes(content)).items()}
                assert not found.keys() & tensors.keys()
                found |= tensors
    assert resumed.same_bits(found, sets_at_helpers(carrier))


@pytest.mark.parametrize("manner", [{"users": ALONE, "interval": 4}, {"users": COLLABORATION, "merged": True}])
@pytest.mark.sampled(1)
def test_users_resume_with_equal_bits(folder: Path, manner: dict[str, Any]) -> None:
    """Sets, moments and counts of every user, and sums in the middle of an interval, are in the checkpoint."""
    case = case_of(folder, adapter="lora[r=4]", num_steps=10, checkpoint_every=6, dtype="float32")
    plan = plan_of(case, **manner)
    whole = make_carrier(case, plan)
    result = resumed.run(plan, whole, 1)
    saved = next(entry for entry in result.logged if isinstance(entry, rd.LogCheckpoint))
    assert saved.step == 6
    again = resumed.rebuilt(case, plan, whole.shards[6], saved)
    end = resumed.run(plan, again, 2, start=StartPoint.of(plan.course, step=6, holder=saved.holder))
    assert end.finish == rd.Finish("", "")
    assert resumed.same_bits(sets_at_helpers(again), sets_at_helpers(whole))
    assert resumed.same_bits(sets_at_hosts(again), sets_at_hosts(whole))


@pytest.mark.parametrize("users", [ALONE, COLLABORATION])
def test_one_user_trains_what_all_train_together(folder: Path, users: str) -> None:
    """With one owner and no column of users the sets are those of a run without users, bit by bit."""
    case = case_of(folder, adapter="lora[r=4]", owners=("a",), num_steps=4)
    joint, own = (
        helped(case.plan(SLICES), HELPERS, HelperSettings(users=word, merged=users == COLLABORATION))
        for word in ("joint", users)
    )
    first, second = (sets_at_helpers(run(plan, make_carrier(case, plan))) for plan in (joint, own))
    assert resumed.same_bits({f"a/{name}": value for name, value in first.items()}, second)


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize(
    ("manner", "changes"),
    [
        ({"users": ALONE, "overlap": True}, {"local_iterations": 4}),
        (
            {"users": ALONE, "interval": 3, "pairs": "bfloat16"},
            {"method": "ringada", "every_steps": 3, "eval_every": 4},
        ),
        ({"users": ALONE, "pairs": "velora", "overlap": True}, {"microbatches": 4, "dropout": 0.1, "eval_every": 2}),
        (TOGETHER | {"overlap": True}, {"local_iterations": 4, "eval_every": 4}),
        (
            TOGETHER | {"interval": 3},
            {"method": "ringada", "every_steps": 3, "frozen": FrozenWeights(dtype="bfloat16")},
        ),
    ],
)
@pytest.mark.sampled(1)
def test_users_train_equal_bits_in_any_timing(folder: Path, manner: dict[str, Any], changes: dict[str, Any]) -> None:
    """Also where hosts do not wait, blocks begin to train later, and evaluations come between."""
    case = case_of(folder, **{"adapter": "lora[r=4]", "dtype": "float32", "num_steps": 12, **changes})
    plan = plan_of(case, **manner)
    ends = []
    for seed in (1, 2):
        carrier = make_carrier(case, plan)
        result = resumed.run(plan, carrier, seed)
        assert result.finish == rd.Finish("", "")
        ends.append((carrier, [entry.values for entry in result.logged if isinstance(entry, rd.LogEvaluation)]))
    for carrier, counted in ends[1:]:
        assert resumed.same_bits(sets_at_helpers(carrier), sets_at_helpers(ends[0][0]))
        assert resumed.same_bits(sets_at_hosts(carrier), sets_at_hosts(ends[0][0]))
        assert counted == ends[0][1]
    assert all(not executor.live_bytes() for executor in ends[0][0].executors.values())
    if manner["users"] == ALONE:
        assert resumed.same_bits(sets_at_hosts(ends[0][0]), sets_at_helpers(ends[0][0]))


@pytest.mark.parametrize(
    ("model_type", "task"),
    [
        ("gpt2", "causal-lm"),
        ("llama", "causal-lm"),
        ("distilbert", "sequence-classification"),
        ("vit", "image-classification"),
    ],
)
@pytest.mark.sampled(1)
def test_users_alone_in_other_families(tmp_path: Path, model_type: str, task: str) -> None:
    """Where query, key and value are one matrix, where the head is a frozen decoder, and where there are images."""
    folder = write_family_inputs(tmp_path, model_type, task)
    case = case_of(folder, task=task, adapter="lora[r=4,intermediate_lora=True]", num_steps=8)
    plan = plan_of(case, users=ALONE)
    carrier = run(plan, make_carrier(case, plan))
    theirs, _ = users_reference.alone(case, plan)
    assert distance(sets_at_hosts(carrier), theirs) < 1e-9

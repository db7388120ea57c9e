"""Users whose adapters are of other kinds train what plain models with these adapters train.

As in ``test_users_equal_one_process``, with ``offload.adapters``: each user's layers are copies from a whole model with
the user's own ``adapter.config``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from coordinator.run.result_files import users_folders
from ringtune.job.job import result_of_user
from ringtune.models.result_files import part_files
from ringtune.run_control import events as rd
from ringtune.schedule.course import ALONE, COLLABORATION, FrozenWeights
from ringtune.schedule.turns import StartPoint, turn_sequence
from ringtune.techniques.offload import users_of
from tests.suites.test_users_equal_one_process import (
    LORA_AND_LINEAR,
    case_of,
    head_of,
    plan_of,
    run,
    sets_at_helpers,
    sets_at_hosts,
)
from tests.support import resumed, users_reference
from tests.support.torch_ring import Case, distance, make_carrier, write_family_inputs, write_inputs

TOGETHER: dict[str, Any] = {"users": COLLABORATION, "merged": True}
LORA, MLP, LINEAR = "lora[r=4,alpha=16]", "mlp[hidden=8,alpha=2.0]", "linear[alpha=0.5]"
MIXTURE = "lora[r=2,attn_matrices=['k']]|linear[attn_matrices=['q']]|mlp[hidden=8,attn_matrices=['v'],alpha=2.0]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def case_with(folder: Path, adapters: dict[str, str], *, users: str = ALONE, **changes: Any) -> Case:
    """Two owners, three users, some of whom have an adapter of another kind."""
    chosen = ", ".join(f'{user} = "{config}"' for user, config in adapters.items())
    merged = str(users == COLLABORATION).lower()
    lines = f'mode = "auto"\nusers = "{users}"\nmerged = {merged}\nadapters = {{ {chosen} }}'
    return case_of(folder, **{"adapter": LORA, "offload": lines, **changes})


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "adapters",
    [
        {"ben": MIXTURE, "c": "seq_bn"},
        {"anna": LINEAR, "ben": LINEAR, "c": "lora[r=8]"},
    ],
)
@pytest.mark.sampled(1)
def test_users_alone_train_layers_with_their_own_adapters(
    folder: Path, adapters: dict[str, str], dropout: float
) -> None:
    """Also where nobody has the job's own kind, and where a batch mixes kinds."""
    case = case_with(folder, adapters, dropout=dropout)
    plan = plan_of(case, users=ALONE)
    carrier = run(plan, make_carrier(case, plan))
    theirs, head = users_reference.alone(case, plan)
    assert distance(sets_at_hosts(carrier), theirs) < 1e-9
    assert resumed.same_bits(sets_at_hosts(carrier), sets_at_helpers(carrier))
    assert distance(head_of(plan, carrier), head) < 1e-9


def test_users_of_other_kinds_are_updated_by_the_sums_of_an_interval(folder: Path) -> None:
    """Who has no row in an interval is not updated by it."""
    case = case_with(folder, {"ben": LINEAR}, dropout=0.1)
    plan = plan_of(case, users=ALONE, interval=3)
    theirs, _ = users_reference.alone(case, plan, interval=3)
    assert distance(sets_at_hosts(run(plan, make_carrier(case, plan))), theirs) < 1e-9


@pytest.mark.parametrize("adapters", [{"ben": LORA_AND_LINEAR}, {"anna": LINEAR, "ben": "lora[r=2]", "c": LINEAR}])
@pytest.mark.sampled(1)
def test_users_of_other_kinds_in_collaboration_train_by_a_matrix_of_the_sum(
    folder: Path, tmp_path: Path, adapters: dict[str, str]
) -> None:
    """Low rank and linear are added up in one matrix, each with its own factor."""
    case = case_with(folder, adapters, users=COLLABORATION)
    plan = plan_of(case, **TOGETHER)
    carrier = make_carrier(case, plan)
    for node, executor in carrier.executors.items():
        executor.offloading.keep_on_disk(tmp_path / node, {"node": node})
    run(plan, carrier)
    assert distance(sets_at_helpers(carrier), users_reference.together(case, plan)) < 1e-9
    assert all(name.endswith(".change") for name in sets_at_hosts(carrier))


@pytest.mark.parametrize("manner", [{"users": ALONE}, TOGETHER])
def test_results_of_users_of_other_kinds_are_their_sets_and_say_their_kind(
    folder: Path, manner: dict[str, Any]
) -> None:
    """The nodes' parts together have each tensor of each user once; the others' config comes with each of them."""
    case = case_with(folder, {"ben": LINEAR}, users=manner["users"], num_steps=4)
    plan = plan_of(case, **manner)
    carrier = run(plan, make_carrier(case, plan))
    holder = list(turn_sequence(plan.course))[-1].owner
    files = {node: executor.adapter_files(with_head=node == holder) for node, executor in carrier.executors.items()}
    users = users_of(plan.course)
    assert {name for sent in files.values() for name in sent} <= set(part_files(users))
    merged = users_folders(files, {user: result_of_user(case.job, user) for user in users})
    found = {
        f"{user}/{name.split('.layer.')[1]}": value
        for user in users
        for name, value in load(bytes(merged[f"users/{user}/adapter.safetensors"])).items()
    }
    assert resumed.same_bits(found, sets_at_helpers(carrier))
    head = {"head_config.json", "model_head.safetensors", "adapter.safetensors"}
    kinds = {user: {path.split("/")[-1] for path in merged if f"/{user}/" in path} - head for user in users}
    assert kinds == {"anna": {"adapter_config.json"}, "ben": {"adapter.json"}, "c": {"adapter_config.json"}}


@pytest.mark.parametrize("users", [ALONE, COLLABORATION])
def test_adapters_of_private_blocks_have_the_kind_of_their_user(folder: Path, users: str) -> None:
    """They never train and are no helper's; a user's folder has them as they began, so that it is whole."""
    case = case_with(
        folder, {"ben": "seq_bn" if users == ALONE else LINEAR}, users=users, num_steps=2, private_blocks=1
    )
    slices = (("a", 1, 2), ("b", 2, 3), ("c", 3, 4))
    plan = plan_of(case, slices=slices, users=users, merged=users == COLLABORATION)
    carrier = run(plan, make_carrier(case, plan))
    parts = [
        executor.adapter_files(with_head=False, with_private=node == "c")
        for node, executor in carrier.executors.items()
    ]
    for user in ("anna", "ben"):
        path = f"users/{user}/adapter.safetensors"
        names = {name for part in parts if path in part for name in load(bytes(part[path]))}
        assert {name.split(".layer.")[1][0] for name in names} == set("0123")
        assert all("lora" in name for name in names) is any("lora" in name for name in names) is (user == "anna")


@pytest.mark.parametrize("manner", [{"users": ALONE, "interval": 4}, TOGETHER])
@pytest.mark.sampled(1)
def test_users_of_other_kinds_resume_with_equal_bits(folder: Path, manner: dict[str, Any]) -> None:
    """Sets, moments, counts and unfinished sums of every kind are in the checkpoint."""
    changes = {"num_steps": 10, "checkpoint_every": 6, "dtype": "float32"}
    case = case_with(folder, {"ben": LINEAR}, users=manner["users"], **changes)
    plan = plan_of(case, **manner)
    whole = make_carrier(case, plan)
    result = resumed.run(plan, whole, 1)
    saved = next(entry for entry in result.logged if isinstance(entry, rd.LogCheckpoint))
    again = resumed.rebuilt(case, plan, whole.shards[6], saved)
    end = resumed.run(plan, again, 2, start=StartPoint.of(plan.course, step=6, holder=saved.holder))
    assert end.finish == rd.Finish("", "")
    assert resumed.same_bits(sets_at_helpers(again), sets_at_helpers(whole))
    assert resumed.same_bits(sets_at_hosts(again), sets_at_hosts(whole))


@pytest.mark.promise("5 timing changes nothing")
@pytest.mark.parametrize(
    ("manner", "changes"),
    [
        ({"users": ALONE, "pairs": "velora", "overlap": True}, {"microbatches": 4, "dropout": 0.1, "eval_every": 2}),
        (
            TOGETHER | {"interval": 3, "pairs": "bfloat16"},
            {"method": "ringada", "every_steps": 3, "frozen": FrozenWeights(dtype="bfloat16")},
        ),
    ],
)
@pytest.mark.thorough
def test_users_of_other_kinds_train_equal_bits_in_any_timing(
    folder: Path, manner: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Also with projections, rounded pairs, frozen weights in 16 bits, and evaluations between."""
    adapters = {"ben": LINEAR if manner["users"] == COLLABORATION else MLP}
    case = case_with(folder, adapters, users=manner["users"], dtype="float32", num_steps=12, **changes)
    plan = plan_of(case, **manner)
    ends = [run(plan, make_carrier(case, plan), seed) for seed in (1, 2)]
    assert resumed.same_bits(*(sets_at_helpers(end) for end in ends))
    assert resumed.same_bits(*(sets_at_hosts(end) for end in ends))
    assert all(not executor.live_bytes() for executor in ends[0].executors.values())


@pytest.mark.parametrize(("model_type", "task"), [("gpt2", "causal-lm"), ("llama", "causal-lm")])
@pytest.mark.sampled(1)
def test_users_of_other_kinds_in_other_families(tmp_path: Path, model_type: str, task: str) -> None:
    """Where query, key and value are one matrix, and where positions are rotated."""
    folder = write_family_inputs(tmp_path, model_type, task)
    case = case_with(folder, {"anna": "linear[intermediate_lora=True]", "c": MLP}, task=task, num_steps=8)
    plan = plan_of(case, users=ALONE)
    carrier = run(plan, make_carrier(case, plan))
    theirs, _ = users_reference.alone(case, plan)
    assert distance(sets_at_hosts(carrier), theirs) < 1e-9

"""``[offload]`` of a job: it is read back as written, and what it does not go with is refused with a remedy."""

from __future__ import annotations

from typing import Any

import pytest

from ringtune.errors import ContradictionError, JobError, PlanError
from ringtune.job.job import parse_job
from ringtune.models.families import FAMILIES
from ringtune.models.family import Dimensions, Widths
from ringtune.run_control.continuation import changed_keys, job_digest
from ringtune.techniques.base import Shape
from ringtune.techniques.offload import check_model, helped, unhelped_reason
from tests.support.cases import cases
from tests.support.choosing import make_choice
from tests.support.fake_agents import job
from tests.support.plans import changed, make_plan


def test_offload_is_read_back_as_written() -> None:
    """An inline table names the helper of each host; the resolved job says the same."""
    text = '[model]\npath = "m"\n[offload]\nmode = { "pi-1" = "laptop" }\ninterval = 4\npairs = "velora"\n'
    found = parse_job(text, source="job.toml")
    assert found.offload.helpers == {"pi-1": "laptop"}
    assert found.offload.is_on and not found.offload.helper_settings.is_exact
    assert parse_job(found.to_toml(), source="job.toml") == found


def test_inputs_that_velora_projects_are_set_with_it_alone() -> None:
    """Those that are wide by default, which has the digest of a job before there was a choice."""
    helped = job(offload__mode="auto", offload__pairs="velora")
    assert helped.offload.helper_settings.projected == "wide"
    every = helped.with_overrides({"offload.projected": "all"})
    assert changed_keys(helped, every) == ("offload.projected",)
    assert every.with_overrides({"offload.pairs": "float32"}) == job(offload__mode="auto")
    assert job(offload__mode="auto").offload.helper_settings.is_exact
    for changes in ({"offload.mode": "auto"}, {}):
        with pytest.raises(JobError, match=r"offload\.projected = 'all' has no meaning with offload\."):
            job().with_overrides({**changes, "offload.projected": "all"})


def test_offload_makes_another_job_and_off_drops_its_settings() -> None:
    """A run does not go on with other helpers by mistake; a job without them keeps its digest."""
    helped = job(offload__mode={"a": "b"}, offload__interval=2)
    assert changed_keys(job(), helped) == ("offload.interval", "offload.mode")
    assert helped.with_overrides({"offload.mode": "off"}) == job()
    assert job_digest(helped) != job_digest(job())


NOTHING_TO_FIT = ("train.method = 'hift', which trains all parameters", "no adapter that a helper could fit")


@cases(
    ("changes", "said"),
    [
        ({"train.method": "pipeadapter"}, "train.method = 'pipeadapter', which keeps several versions of adapters"),
        ({"train.method": "hift"}, "train.method = 'hift', which trains all parameters"),
        ({"adapter.config": "full"}, "no adapter that a helper could fit"),
        ({"adapter.config": "ia3"}, "ia3 scales what a matrix gives"),
        ({"operations.policy": "two-stage", "operations.compute": 0.6}, "set operations.policy = 'standard'"),
    ],
)
def test_offload_is_refused_where_nobody_can_help(changes: dict[str, Any], said: str) -> None:
    """One clear error that names both keys and the remedy, before any node is asked; ``auto`` goes without helpers."""
    for keys in ({"offload.mode": {"a": "b"}}, {"offload.mode": "auto", "offload.users": "alone"}):
        with pytest.raises(JobError) as caught:
            job().with_overrides(changes | keys)
        assert str(caught.value).startswith("[offload] can't go with ")
        assert said in str(caught.value)
        assert str(caught.value).endswith("or set offload.mode = 'off'")
        assert isinstance(caught.value, ContradictionError) == (said in NOTHING_TO_FIT)
    without = job().with_overrides(changes | {"offload.mode": "auto"})
    assert said in f"{unhelped_reason(without)}, or set offload.mode = 'off'"
    assert not unhelped_reason(job().with_overrides(changes))


def test_named_helpers_go_with_velora_at_other_hosts() -> None:
    """The planner's own choice goes without helpers; with users every host has one, and nothing is projected."""
    keys: dict[str, Any] = {"memory.activations": "velora", "offload.mode": {"a": "b"}}
    assert not unhelped_reason(job().with_overrides(keys))
    assert "offload.pairs = 'velora' projects what is sent" in unhelped_reason(
        job().with_overrides(keys | {"offload.mode": "auto"})
    )
    assert not unhelped_reason(job().with_overrides(keys | {"offload.users": "alone"}))


CHOSEN = {"operations.policy": "two-stage", "operations.compute": 0.6, "operations.heads": 0}


def test_operations_of_whole_blocks_are_chosen_beside_helpers() -> None:
    """Hosts score base weights, which they have; not adapters, nor weights with adapters in them or of each user."""
    keys: dict[str, Any] = {**CHOSEN, "offload.mode": "auto"}
    assert job().with_overrides(keys).operations.is_chosen
    for other in (
        {"operations.scores": "adapter"},
        {"offload.merged": True, "adapter.config": "lora"},
        {"offload.users": "alone"},
    ):
        with pytest.raises(JobError, match="unless it is for whole blocks"):
            job().with_overrides(keys | other | {"offload.mode": {"a": "b"}})
    choice = make_choice(subnets=1, scored_weights="adapter")
    plan = changed(make_plan([("a", 0, 2), ("b", 2, 4)], ["a"]), choice=choice)
    with pytest.raises(PlanError, match="which hosts have of base weights"):
        helped(plan, {"a": "b"})


def test_offload_of_a_gate_needs_matrices_of_their_own() -> None:
    """Whether query, key and value are one matrix is known with the model only."""
    sizes = Dimensions(num_blocks=2, hidden=8, inner=16, num_heads=2, vocab=9, longest=8)
    apart, merged = (
        Shape(FAMILIES["gpt2"], sizes, Widths.plain(8, 16, merged=is_merged), "config.json")
        for is_merged in (False, True)
    )
    found = job(adapter__config="lora[use_gating=True]", offload__mode={"a": "b"})
    check_model(found, apart)
    check_model(found.with_overrides({"offload.mode": "auto"}), merged)  # goes without
    with pytest.raises(JobError, match="one matrix for query, key and value"):
        check_model(found, merged)


ALONE = {"offload.mode": "auto", "offload.users": "alone"}
TOGETHER = {"offload.mode": "auto", "offload.users": "collaboration", "adapter.config": "linear"}


@cases(
    ("changes", "said"),
    [
        ({"offload.users": "alone"}, "offload.users = 'alone' has no meaning with offload.mode = 'off'"),
        ({**ALONE, "offload.merged": True, "adapter.config": "linear"}, "set offload.merged = false"),
        (TOGETHER, "offload.users = 'collaboration' adds the adapters of all users to one matrix; set offload.merged"),
        (
            {**TOGETHER, "offload.merged": True, "adapter.config": "mlp"},
            "set offload.merged = false and offload.users = 'alone'",
        ),
        ({"data.user": "who"}, "data.user = 'who' has no meaning with offload.users = 'joint'"),
        ({**ALONE, "data.user": " "}, "data.user is ' '; name a column, or remove it"),
        (
            {**ALONE, "data.user": "who", "model.task": "image-classification"},
            "data.user = 'who' has no meaning for model.task = 'image-classification', where rows have no columns",
        ),
    ],
)
def test_offload_of_users_is_refused_with_both_keys_and_a_remedy(changes: dict[str, Any], said: str) -> None:
    """What merging and a task's rows do not allow is an error before any node is asked."""
    with pytest.raises(JobError) as caught:
        job().with_overrides(changes)
    assert said in str(caught.value)


def test_offload_of_users_is_dropped_with_the_helpers() -> None:
    """Without helpers, or with one set of adapters for all, nobody asks whose a row is; old digests last."""
    helped = job().with_overrides({**ALONE, "data.user": "who"})
    assert helped.offload.helper_settings.has_users
    assert helped.with_overrides({"offload.mode": "off"}) == job()
    assert helped.with_overrides({"offload.users": "joint"}).data.user == ""
    assert job_digest(helped) != job_digest(job().with_overrides(ALONE))
    assert "data.user" not in changed_keys(job(), job().with_overrides(ALONE))

"""Which kind of adapter each user has, and what a job may not ask of it."""

from __future__ import annotations

import pytest

from ringtune.errors import JobError
from ringtune.jobs.job import Job, parse_job
from ringtune.jobs.result import result_of_user
from ringtune.jobs.user_adapters import config_of, job_of_user, kinds_of

USERS = ("anna", "ben", "carl", "dora")


def job_with(adapters: str, *, users: str = "alone", config: str = "lora", more: str = "") -> Job:
    """A job whose users have adapters of their own."""
    merged = str(users == "collaboration").lower()
    offload = f'[offload]\nmode = "auto"\nusers = "{users}"\nmerged = {merged}\nadapters = {adapters}\n{more}'
    return parse_job(f'[model]\npath = "m"\n[adapter]\nconfig = "{config}"\n{offload}', source="test")


def test_kinds_are_in_the_order_of_users_after_the_jobs_own() -> None:
    """The job's own kind is the first one; equal configurations are one kind, however they are written."""
    job = job_with('{ anna = "linear", carl = "mlp[hidden=8]", dora = "linear[]" }')
    kinds = kinds_of(job, USERS)
    assert [(kind.number, kind.config, kind.users) for kind in kinds] == [
        (0, "lora", ("ben",)),
        (1, "linear", ("anna", "dora")),
        (2, "mlp[hidden=8]", ("carl",)),
    ]
    assert [kind.prefix for kind in kinds] == ["", "1/", "2/"]


def test_jobs_own_kind_is_there_without_users() -> None:
    """Head, embedding and blocks are made with it."""
    kinds = kinds_of(job_with('{ anna = "linear", ben = "linear" }'), ("anna", "ben"))
    assert [kind.users for kind in kinds] == [(), ("anna", "ben")]


def test_where_all_train_the_same_there_is_one_kind() -> None:
    """Also in a job that names others, where its users are not known."""
    assert [kind.config for kind in kinds_of(job_with('{ anna = "linear" }'), ())] == ["lora"]


def test_job_and_result_of_a_user_have_the_users_adapter() -> None:
    """And no adapter of another user."""
    job = job_with('{ anna = "linear" }')
    assert (config_of(job, "anna"), config_of(job, "ben")) == ("linear", "lora")
    own = job_of_user(job, "anna")
    assert (own.adapter.config, own.offload.adapters) == ("linear", None)
    assert "adapter.json" in result_of_user(job, "anna").files
    assert "adapter_config.json" in result_of_user(job, "ben").files


def test_user_who_is_none_of_the_run_is_refused() -> None:
    """It names the users."""
    with pytest.raises(JobError, match=r"offload.adapters.zoe: no user .*'zoe'; its users are anna, ben"):
        kinds_of(job_with('{ zoe = "linear" }'), USERS)


@pytest.mark.parametrize(
    ("adapters", "users", "said"),
    [
        ("{ }", "alone", "offload.adapters is an empty table"),
        ('{ anna = "linear" }', "joint", "no meaning with offload.users = 'joint'.*set offload.users = 'alone'"),
        ('{ "An na" = "linear" }', "alone", "user name 'An na' is not allowed"),
        ('{ anna = "ia3" }', "alone", "offload.adapters.anna: adapter.config 'ia3' can't be fitted by a helper"),
        ('{ anna = "liner" }', "alone", "offload.adapters.anna: adapter.config 'liner' is not known"),
        ('{ anna = "full" }', "alone", "offload.adapters.anna: adapter.config = 'full' has no adapter"),
        ('{ anna = "mlp" }', "collaboration", "adapter 'mlp' can't be merged.*offload.users = 'alone'.*adapters.anna"),
        ("{ anna = 3 }", "alone", r"offload.adapters.anna"),
    ],
)
def test_adapters_that_users_can_not_have_are_refused(adapters: str, users: str, said: str) -> None:
    """One line names the key, why, and the remedy."""
    with pytest.raises(JobError, match=said):
        job_with(adapters, users=users)


def test_helpers_that_are_off_have_no_users_adapters() -> None:
    """The whole section has no meaning then."""
    with pytest.raises(JobError, match=r"offload.users = 'alone' has no meaning with offload.mode = 'off'"):
        parse_job('[model]\npath = "m"\n[offload]\nusers = "alone"\nadapters = { anna = "linear" }\n', source="test")

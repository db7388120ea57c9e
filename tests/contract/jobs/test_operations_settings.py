"""``[operations]`` of a job: every key is read, written, refused by name, and no part of older digests."""

from __future__ import annotations

import base64
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from ringtune.errors import JobError
from ringtune.jobs.job import Job, Model, OperationsSettings, Train, load_job, parse_job, with_absolute_paths
from ringtune.jobs.operations.given_table import given_tables
from ringtune.rounds.job_changes import changed_keys, describe_changes, job_digest
from ringtune.schedule.operations.given import GivenTable
from ringtune.schedule.operations.table import BatchOperations, Operations

JOB = Job(model=Model(path="m"))
CHOSEN = {"operations.policy": "two-stage", "operations.compute": 0.6}
TABLE = Operations(batches=(BatchOperations(owner="a", batch_id=0, rows=("1131", "1211")),))
GIVEN = GivenTable(step=0, operations=TABLE)


@pytest.mark.parametrize("name", ["heads", "compute", "full", "forward_only", "score_scale", "refresh_rounds"])
def test_true_is_no_number(name: str) -> None:
    """``full = true`` is not one micro-batch."""
    with pytest.raises(JobError, match=rf"operations.{name} is true, it has to be a number"):
        OperationsSettings(**{"full": 2, name: True})  # type: ignore[arg-type]


def test_operations_survive_toml_with_every_key() -> None:
    """Each key is written and read again."""
    settings = OperationsSettings(
        policy="joint",
        heads=2,
        by_slice=True,
        full=2,
        forward_only=1,
        balance=True,
        backward_score="taylor",
        forward_score="gradient-magnitude",
        score_scale=0.25,
        ties="together",
        refresh_rounds=3,
    )
    job = dataclasses.replace(JOB, operations=settings)
    assert parse_job(job.to_toml(), source="job") == job
    assert settings.changed() == tuple(
        entry.name for entry in dataclasses.fields(settings) if entry.name not in ("compute", "table")
    )


CHANGES = [
    {"operations.heads": 2},
    {"operations.by_slice": True},
    {"operations.balance": True},
    {"operations.backward_score": "taylor"},
    {"operations.forward_score": "taylor"},
    {"operations.score_scale": 0.5},
    {"operations.ties": "together"},
    {"operations.refresh_rounds": 3},
    {"operations.compute": 0.5},
    {"operations.policy": "joint"},
    {"operations.policy": "random"},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_key_of_operations_makes_another_job(change: dict[str, object]) -> None:
    """A run does not go on under other operations than it began with."""
    job = JOB.with_overrides(CHOSEN)
    other = job.with_overrides(change)
    assert job_digest(other) != job_digest(job)
    assert changed_keys(job, other) == tuple(change)


def test_operations_left_alone_keep_the_digests_of_older_jobs() -> None:
    """The digest of a job of version 0.2, whose jobs had no such section."""
    assert JOB.operations == OperationsSettings()
    assert job_digest(JOB) == "e0c2301db82f3bd4e7fbb7590fc88e8873d8925effa59bd345bf3d83b1164441"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"policy": "two_stage"}, "operations.policy = 'two_stage' is not one of standard, two-stage"),
    ({"policy": "two-stage", "compute": 0.0}, "operations.compute is 0.0, it has to be above 0 and at most 1"),
    ({"policy": "two-stage", "compute": 1.5}, "operations.compute is 1.5, it has to be above 0 and at most 1"),
    ({"policy": "two-stage", "compute": -0.1}, "operations.compute is -0.1, it has to be above 0"),
    ({"policy": "two-stage"}, "operations.policy = 'two-stage' needs operations.compute or operations.full"),
    ({"compute": 0.6}, "operations.compute = 0.6 has no meaning with operations.policy = 'standard'"),
    ({"full": 3}, "operations.full = 3 has no meaning with operations.policy = 'standard'"),
    ({"by_slice": True}, "operations.by_slice = true has no meaning with operations.policy = 'standard'"),
    ({"balance": True}, "operations.balance = true has no meaning with operations.policy = 'standard'"),
    ({"refresh_rounds": 2}, "operations.refresh_rounds = 2 has no meaning with operations.policy = 'standard'"),
    ({"policy": "joint", "full": 5}, "operations.full is 5, a batch has train.microbatches = 4; lower it or raise"),
    (
        {"policy": "joint", "full": 3, "forward_only": 2},
        "operations.full + operations.forward_only is 5, a batch has train.microbatches = 4",
    ),
    ({"policy": "joint", "full": -1}, "operations.full is -1, it has to be at least 0"),
    ({"policy": "joint", "forward_only": 1}, "operations.forward_only needs operations.full"),
    ({"policy": "joint", "full": 1, "compute": 0.5}, "both say how much is done; keep one"),
    ({"policy": "joint", "compute": 0.5, "score_scale": 0.0}, "operations.score_scale is 0.0, it has to be above 0"),
    ({"policy": "joint", "compute": 0.5, "heads": -1}, "operations.heads is -1"),
    ({"policy": "joint", "compute": 0.5, "forward_score": "loss"}, "operations.forward_score = 'loss' is not one of"),
    ({"refresh_rounds": 1_000_001}, "operations.refresh_rounds is 1000001, it has to be at most 1,000,000"),
    ({"table": "{}", "heads": 2}, "operations.table has the operations of an earlier run, operations.heads would"),
    ({"table": "{}", "policy": "joint"}, "operations.policy would choose others; remove one of them"),
]


@pytest.mark.parametrize(("values", "message"), BAD, ids=lambda part: str(part)[:50])
def test_operations_refuse_by_name(values: dict[str, Any], message: str) -> None:
    """Budgets outside (0, 1], counts that do not fit the micro-batches, and two ways of saying one thing."""
    with pytest.raises(JobError) as caught:
        JOB.with_overrides({f"operations.{name}": value for name, value in values.items()})
    assert message in str(caught.value)


def test_operations_of_nan_are_refused() -> None:
    """Neither a budget nor a scale is a number then."""
    with pytest.raises(JobError, match=r"operations.compute is nan"):
        OperationsSettings(policy="joint", compute=float("nan"))
    with pytest.raises(JobError, match=r"operations.score_scale is nan"):
        OperationsSettings(policy="joint", score_scale=float("nan"))


def test_operations_said_otherwise_leave_the_other_way_behind() -> None:
    """On the command line one key is changed, not three."""
    job = JOB.with_overrides(CHOSEN)
    counted = job.with_overrides({"operations.full": 2})
    assert (counted.operations.compute, counted.operations.full) == (None, 2)
    assert counted.with_overrides({"operations.compute": 0.5}).operations.full is None
    assert job.with_overrides({"operations.policy": "standard"}) == JOB
    assert job.with_overrides({"operations.table": "a.json"}).operations == OperationsSettings(table="a.json")


def test_operations_fit_more_micro_batches() -> None:
    """The counts are compared with the job's own number."""
    train = Train(microbatches=5)
    job = Job(model=Model(path="m"), train=train, operations=OperationsSettings(policy="joint", full=3, forward_only=2))
    assert job.operations.is_chosen


def test_operations_do_not_go_with_private_blocks() -> None:
    """An owner that runs blocks itself is in no table."""
    with pytest.raises(JobError, match=r"privacy.private_blocks = 1 and \[operations\] can't go together"):
        JOB.with_overrides({**CHOSEN, "privacy.private_blocks": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train.dropout": 0.1}, "train.dropout = 0.1 can't be drawn for a part of the heads"),
        ({"adapter.config": "ia3"}, "adapter.config 'ia3' can't be run by head groups"),
        ({"adapter.config": "dora"}, "DoRA takes norms over the whole matrix"),
    ],
)
def test_operations_of_heads_need_an_adapter_and_dropout_that_can_be_parted(
    change: dict[str, object], message: str
) -> None:
    """Whole blocks and whole slices can have any of them."""
    job = JOB.with_overrides(change)
    with pytest.raises(JobError) as caught:
        job.with_overrides(CHOSEN)
    assert message in str(caught.value)
    assert job.with_overrides({**CHOSEN, "operations.heads": 0}).operations.is_chosen
    assert job.with_overrides({**CHOSEN, "operations.by_slice": True}).operations.is_chosen


# ---- a given table ---------------------------------------------------------------------------------


def _job_with(tmp_path: Path, value: object) -> Path:
    (tmp_path / "operations.json").write_text(value if isinstance(value, str) else json.dumps(value))
    (tmp_path / "job.toml").write_text("[model]\npath = 'm'\n[operations]\ntable = 'operations.json'\n")
    return tmp_path / "job.toml"


@pytest.mark.parametrize(
    "value", [TABLE.to_json(), {"schema": 1, "tables": [{"step": 0, "operations": TABLE.to_json()}]}]
)
def test_given_table_travels_with_the_job(tmp_path: Path, value: object) -> None:
    """The file is read where the job is; the job that a run writes down names no file any more."""
    job = load_job(_job_with(tmp_path, value))
    assert given_tables(job.operations) == (GIVEN,)
    assert given_tables(parse_job(job.to_toml(), source="job").operations) == (GIVEN,)
    assert job.operations.is_any
    assert not job.operations.is_chosen


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[", "is not JSON"),
        ("[]", "have to be a JSON object"),
        ({"subnets": 1}, "batches has to be a list"),
        ({"schema": 1, "tables": []}, "the list has no table"),
        ({"schema": 1, "course": {}, "placements": []}, "is a plan; give the operations.json beside it"),
        ("[" * 100_000, "is not JSON"),
        ({"schema": 1, "tables": [{"steps": 8}]}, "unknown key"),
        ({"schema": 1, "tables": [{"step": 8, "operations": TABLE.to_json()}]}, "have to begin at step 0"),
        ({"subnets": 1, "rows": [[2, 4, "!"]], "batches": [["a", 0, 0]]}, "packed operations are not readable"),
    ],
)
def test_given_table_is_refused_with_its_file(tmp_path: Path, value: object, message: str) -> None:
    """What is no table of operations is an error of the job, which names the file."""
    with pytest.raises(JobError) as caught:
        load_job(_job_with(tmp_path, value))
    assert message in str(caught.value)
    assert "plan anew" not in str(caught.value)  # nobody plans a file that was given


def test_given_tables_have_the_steps_that_they_hold_from(tmp_path: Path) -> None:
    """A run that chose anew wrote several."""
    tables = [{"step": step, "operations": TABLE.to_json()} for step in (0, 40)]
    assert given_tables(load_job(_job_with(tmp_path, {"schema": 1, "tables": tables})).operations) == (
        GIVEN,
        GivenTable(step=40, operations=TABLE),
    )


def test_given_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The file and the reason."""
    path = _job_with(tmp_path, "{}")
    (tmp_path / "operations.json").unlink()
    with pytest.raises(JobError, match=r"can't read operations.table .*operations.json: No such file"):
        load_job(path)


@pytest.mark.parametrize("name", ["a\0b", "~nouser_x/t.json"])
def test_given_table_whose_name_is_no_path_is_refused(tmp_path: Path, name: str) -> None:
    """No such user, and a byte that no path has."""
    job = JOB.with_overrides({"operations.table": name})
    with pytest.raises(JobError, match=r"operations.table .*; give the operations.json of a run"):
        with_absolute_paths(job, tmp_path)


def test_given_table_is_told_shortly(tmp_path: Path) -> None:
    """A message about changed keys does not have a whole table in it."""
    many = Operations(batches=tuple(BatchOperations(owner="a", batch_id=at, rows=("1131" * 50,)) for at in range(50)))
    job = load_job(_job_with(tmp_path, many.to_json()))
    before = dataclasses.replace(job, operations=OperationsSettings())
    assert len(describe_changes(before, job)) < 300


def _packed_table(rng: random.Random) -> dict[str, Any]:
    """Any table of 600 batches of 4 micro-batches with 72 codes each."""
    packed = [bytes([*(rng.randrange(243) for _ in range(57)), rng.randrange(27)]) for _ in range(600)]
    rows = [[4, 72, base64.b64encode(each).decode()] for each in packed]
    return {"subnets": 6, "rows": rows, "batches": [["a", at, at] for at in range(600)]}


def test_given_tables_of_a_run_of_real_size_fit_into_a_job(tmp_path: Path) -> None:
    """Sixteen tables of 600 batches, none alike: the job that a run writes down is read again."""
    rng = random.Random(1)
    tables = [{"step": 40 * at, "operations": _packed_table(rng)} for at in range(16)]
    job = load_job(_job_with(tmp_path, {"schema": 1, "tables": tables}))
    (tmp_path / "again.toml").write_text(job.to_toml())
    assert load_job(tmp_path / "again.toml") == job
    assert len(job.operations.table) > 900_000


def test_given_tables_that_no_job_has_room_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy is one that there is for several tables too."""
    monkeypatch.setattr("ringtune.jobs.operations.given_table._MOST_TEXT", 10)
    with pytest.raises(JobError, match=r"has room for 10; repeat that run by its own job.toml"):
        load_job(_job_with(tmp_path, TABLE.to_json()))

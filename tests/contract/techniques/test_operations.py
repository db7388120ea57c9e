"""Tests of ``ringtune.techniques.operations``: operations settings, expected."""

from __future__ import annotations

import base64
import dataclasses
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ringtune.errors import JobError, PlanError
from ringtune.job.job import Job, Model, OperationsSettings, Train, load_job, parse_job
from ringtune.run_control.continuation import changed_keys, job_digest
from ringtune.schedule.operation_tables import BatchOperations, BlockCapacity, Choice, Operations, ScheduledTable
from ringtune.techniques.operations import choosers_of, expected_table, given_tables
from tests.support.cases import cases
from tests.support.choosing import choosing_course

JOB = Job(model=Model(path="m"))
CHOSEN = {"operations.policy": "two-stage", "operations.compute": 0.6}
TABLE = Operations(batches=(BatchOperations(owner="a", batch_id=0, rows=("1131", "1211")),))


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
        scores="adapter",
        ties="spread",
        rotate=False,
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
    {"operations.scores": "adapter"},
    {"operations.ties": "spread"},
    {"operations.rotate": False},
    {"operations.refresh_rounds": 3},
    {"operations.compute": 0.5},
    {"operations.policy": "joint"},
    {"operations.policy": "random"},
]


@cases("change", CHANGES)
def test_every_key_of_operations_makes_another_job(change: dict[str, object]) -> None:
    """A run does not go on under other operations than it began with."""
    job = JOB.with_overrides(CHOSEN)
    other = job.with_overrides(change)
    assert job_digest(other) != job_digest(job)
    assert changed_keys(job, other) == tuple(change)


def test_operations_of_former_jobs_keep_their_digests() -> None:
    """Ties and rotation count only where they decide, and the former values are left out: printed by dd0cf338."""
    former = JOB.with_overrides({"operations.ties": "spread", "operations.rotate": False})
    assert job_digest(JOB) == "e0c2301db82f3bd4e7fbb7590fc88e8873d8925effa59bd345bf3d83b1164441"
    chosen = former.with_overrides(CHOSEN)
    assert job_digest(chosen) == "2c81a27f5bbd99395fca4a43dcb7e6f466fe45b3ff631a8e48033773a59cc520"
    assert changed_keys(chosen, JOB.with_overrides(CHOSEN)) == ("operations.rotate", "operations.ties")
    for policy in ("standard", "random", "magnitude"):
        keys = {} if policy == "standard" else {**CHOSEN, "operations.policy": policy}
        one, other = former.with_overrides(keys), JOB.with_overrides(keys)
        assert changed_keys(one, other) == () and job_digest(one) == job_digest(other), policy


BAD: list[tuple[dict[str, Any], str]] = [
    ({"policy": "two-stage"}, "operations.policy = 'two-stage' needs operations.compute or operations.full"),
    ({"compute": 0.6}, "operations.compute = 0.6 has no meaning with operations.policy = 'standard'"),
    ({"full": 3}, "operations.full = 3 has no meaning with operations.policy = 'standard'"),
    ({"by_slice": True}, "operations.by_slice = true has no meaning with operations.policy = 'standard'"),
    ({"balance": True}, "operations.balance = true has no meaning with operations.policy = 'standard'"),
    ({"refresh_rounds": 2}, "operations.refresh_rounds = 2 has no meaning with operations.policy = 'standard'"),
    ({"scores": "adapter"}, "operations.scores = adapter has no meaning with operations.policy = 'standard'"),
    ({"policy": "joint", "full": 5}, "operations.full is 5, a batch has train.microbatches = 4; lower it or raise"),
    (
        {"policy": "joint", "full": 3, "forward_only": 2},
        "operations.full + operations.forward_only is 5, a batch has train.microbatches = 4",
    ),
    ({"policy": "joint", "forward_only": 1}, "operations.forward_only needs operations.full"),
    ({"policy": "joint", "full": 1, "compute": 0.5}, "operations.full both say how much is done; keep one"),
    ({"forward_only": 1, "compute": 0.5}, "operations.forward_only both say how much is done; keep one"),
    ({"table": "{}", "heads": 2}, "operations.table has the operations of an earlier run, operations.heads would"),
    ({"table": "{}", "policy": "joint"}, "operations.policy would choose others; remove one of them"),
]


@cases(("values", "message"), BAD)
def test_operations_refuse_by_name(values: dict[str, Any], message: str) -> None:
    """Budgets outside (0, 1], counts that do not fit the micro-batches, and two ways of saying one thing."""
    with pytest.raises(JobError) as caught:
        JOB.with_overrides({f"operations.{name}": value for name, value in values.items()})
    assert message in str(caught.value)


def test_scores_of_an_adapter_are_refused_where_there_is_none() -> None:
    """With ``full`` the scored base weights are those that train."""
    chosen = {**CHOSEN, "operations.scores": "adapter"}
    with pytest.raises(JobError, match=r"operations.scores = 'adapter' has no meaning .*'full', .*; remove it, or set"):
        JOB.with_overrides({**chosen, "adapter.config": "full"})
    assert JOB.with_overrides({**chosen, "adapter.config": "lora"}).operations.scores == "adapter"


def test_operations_said_otherwise_leave_the_other_way_behind() -> None:
    """On the command line one key is changed, not three."""
    counted = JOB.with_overrides(CHOSEN).with_overrides({"operations.full": 2})
    assert (counted.operations.compute, counted.operations.full) == (None, 2)
    assert counted.with_overrides({"operations.compute": 0.5}).operations.full is None
    assert counted.with_overrides({"operations.policy": "standard"}) == JOB
    assert counted.with_overrides({"operations.table": "a.json"}).operations == OperationsSettings(table="a.json")


def test_operations_fit_more_micro_batches() -> None:
    """The counts are compared with the job's own number."""
    train = Train(microbatches=5)
    job = Job(model=Model(path="m"), train=train, operations=OperationsSettings(policy="joint", full=3, forward_only=2))
    assert job.operations.is_chosen


@cases(
    ("change", "message"),
    [
        ({"adapter.config": "ia3"}, "adapter.config 'ia3' can't be run by head groups"),
        ({"adapter.config": "dora"}, "DoRA takes norms over the whole matrix"),
    ],
)
def test_operations_of_heads_need_an_adapter_that_can_be_parted(change: dict[str, object], message: str) -> None:
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


@cases(
    ("value", "steps"),
    [
        (TABLE.to_json(), [0]),
        ({"schema": 1, "tables": [{"step": 0, "operations": TABLE.to_json()}]}, [0]),
        ({"schema": 1, "tables": [{"step": at, "operations": TABLE.to_json()} for at in (0, 40)]}, [0, 40]),
    ],
)
def test_given_tables_travel_with_the_job(tmp_path: Path, value: object, steps: list[int]) -> None:
    """With their steps; the file is read where the job is, and the job that a run writes down names no file."""
    job = load_job(_job_with(tmp_path, value))
    given = tuple(ScheduledTable(step=step, operations=TABLE) for step in steps)
    assert given_tables(job.operations) == given_tables(parse_job(job.to_toml(), source="job").operations) == given
    assert job.operations.is_any and not job.operations.is_chosen


@cases(
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


def test_given_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The file and the reason."""
    path = _job_with(tmp_path, "{}")
    (tmp_path / "operations.json").unlink()
    with pytest.raises(JobError, match=r"can't read operations.table .*operations.json: No such file"):
        load_job(path)


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
    monkeypatch.setattr("ringtune.techniques.operations._MAX_TEXT", 10)
    with pytest.raises(JobError, match=r"has room for 10; repeat that run by its own job.toml"):
        load_job(_job_with(tmp_path, TABLE.to_json()))


@cases("microbatches", [2, 3, 5, 8])
@cases("subnets", [1, 3, 6, 12])
def test_full_operations_are_spread_evenly(microbatches: int, subnets: int) -> None:
    """Each subnet has its counts; all micro-batches have nearly as many full subnets; none passes all blocks by."""
    for full in range(1, microbatches + 1):
        course = choosing_course(full=full, microbatches=microbatches, subnets=subnets, num_blocks=12)
        rows = expected_table(course).batches[1].rows
        assert {Counter(column)["1"] for column in zip(*rows, strict=True)} == {full}
        totals = [row.count("1") for row in rows]
        assert max(totals) - min(totals) <= 2
        assert min(totals) > 0 or full * subnets * 12 < microbatches


def test_blocks_of_a_group_share_one_code_and_those_that_never_train_are_full() -> None:
    """The next group takes the micro-batches that the last one left; frozen blocks have no chooser."""
    course = choosing_course(full=2, microbatches=4, num_blocks=4, groups=((0, 2), (2, 4)))
    assert expected_table(course).batches[0].rows == ("1133", "1133", "3311", "3311")
    course = choosing_course(full=1, microbatches=2, num_blocks=4, frozen_blocks=2)
    assert [chooser.start for chooser in choosers_of(course)] == [2, 3]
    assert expected_table(course).batches[0].rows == ("1113", "1131")


def test_pruning_keeps_whole_subnets() -> None:
    """The expected table of a pruning policy has so many whole subnets; each is full for all micro-batches."""
    course = choosing_course(full=3, microbatches=5, subnets=5, num_blocks=4, policy="magnitude")
    rows = expected_table(course).batches[0].rows
    assert set(rows) == {rows[0]}
    assert Counter(rows[0]) == {"1": 12, "3": 8}


def test_small_batch_has_its_share_of_capacity() -> None:
    """An owner of fewer rows than a batch has capacities in the same share."""
    course = choosing_course(full=2, microbatches=4, num_blocks=2, size=2, train_rows=4)
    assert all(row.count("1") == 1 for row in expected_table(course).batches[0].rows)


def test_given_tables_are_expected() -> None:
    """Where tables are given, the first one is what comes, and nobody chooses."""
    course = choosing_course(full=1, microbatches=2, num_blocks=2)
    table = expected_table(course)
    given = dataclasses.replace(course, choice=Choice.given([ScheduledTable(step=0, operations=table)]))
    assert expected_table(given) == table
    assert choosers_of(given) == ()


@cases("groups", [((0, 2), (1, 4)), ((2, 2),), ((0, 1, 2),), ((0, 5),)])
def test_wrong_groups_are_refused(groups: tuple[tuple[int, ...], ...]) -> None:
    """Groups are ascending ranges of the blocks of the model."""
    with pytest.raises(PlanError, match="groups"):
        choosing_course(full=2, microbatches=4, num_blocks=4, groups=groups)


def test_groups_of_subnets_are_refused() -> None:
    """A group is one subnet."""
    with pytest.raises(PlanError, match="1 subnet"):
        Choice(
            policy="two-stage",
            subnets=2,
            groups=((0, 2),),
            capacities=(BlockCapacity(full=1, forward_only=0, forward=1, backward=1),),
        )

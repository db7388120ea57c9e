"""What reads plans, jobs, profiles and what a run goes on from."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from coordinator.planner.given_plan import GivenPlan
from coordinator.run.requests import RunRequest, read_run_request, run_request_to_proto
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.job.job import Job, Model, parse_job
from ringtune.run_control.checkpoint import CheckpointManifest, Resume
from ringtune.schedule.operation_tables import Operations
from ringtune.schedule.plan import Plan
from ringtune.storage.strict import json_digest, read_object
from tests.contract.run_control.test_checkpoint import JOB, manifest
from tests.contract.run_control.test_checkpoint import PLAN as PLAN_OF_MANIFEST
from tests.support.fake_agents import facts, job
from tests.support.fuzz.reader import Reader
from tests.support.moves import moving
from tests.support.plans import make_plan, random_operations, random_plan, random_replicas


def readers() -> tuple[Reader, ...]:
    """Make them."""
    rng = random.Random(0)
    still = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], checkpoint_every=2, eval_every=2)
    plans = [still, moving(still, (1, (("b", 0, 2), ("a", 2, 4)))), random_replicas(rng)]
    plans += [random_plan(rng, with_operations=True) for _ in range(4)]
    tables = [random_operations(rng, still.course), random_operations(rng, still.course, subnets=2, codes="12")]
    resume = Resume(plan=PLAN_OF_MANIFEST, manifests=(manifest(4),))
    profile = Profile(nodes=(facts("a"), facts("b")))
    given = GivenPlan(plan=still)
    jobs = [Job(model=Model(path="model")), job(), job(train__method="hift", hift__group_size=1)]
    request = RunRequest(job=jobs[1], resume=resume, profile=profile, plan=given, nodes=("a",))
    return (
        _of_json("plan", [one.to_json() for one in plans], Plan.from_json, _again(Plan.from_json)),
        _of_json("given plan", [given.to_json()], GivenPlan.from_json),
        _of_json("facts", [facts("a").to_message()], NodeFacts.from_message, _again(NodeFacts.from_message)),
        _of_json("profile", [profile.to_json()], Profile.from_json, _again(Profile.from_json)),
        _of_json("table", [one.to_json() for one in tables], lambda value: Operations.from_json(value, where="table")),
        _of_json("manifest", [manifest(4).to_json()], CheckpointManifest.from_json, repair=_with_right_digest),
        Reader(
            name="resume",
            seeds=(resume.to_text().encode(),),
            read=lambda data: Resume.parse(_text(data)).check(JOB),
            is_json=True,
        ),
        Reader(
            name="job",
            seeds=tuple(one.to_toml().encode() for one in jobs),
            read=lambda data: parse_job(_text(data), source="job.toml").to_toml(),
        ),
        Reader(name="request", seeds=(run_request_to_proto(request).SerializeToString(),), read=read_run_request),
    )


def _of_json(
    name: str,
    values: list[Any],
    read: Callable[[Any], Any],
    check: Callable[[Any], None] = lambda found: None,
    *,
    repair: Callable[[Any], Any] | None = None,
) -> Reader:
    seeds = tuple(json.dumps(value).encode() for value in values)

    def whole(data: bytes) -> None:
        check(read(read_object(data, "a text")))

    return Reader(name=name, seeds=seeds, read=whole, is_json=True, repair=repair)


def _again(read: Callable[[Any], Any]) -> Callable[[Any], None]:
    """What passes can be written again, and is read as the same."""

    def check(found: Any) -> None:
        written = found.to_message() if isinstance(found, NodeFacts) else found.to_json()
        assert read(json.loads(json.dumps(written, allow_nan=False))) == found, "it reads another one"

    return check


def _with_right_digest(value: Any) -> Any:
    """A manifest that says what its content is, as somebody does who changes one on purpose."""
    if not isinstance(value, dict):
        return value
    of = {key: item for key, item in value.items() if key not in ("digest", "unfreezing") and item is not None}
    return {**value, "digest": json_digest(of)}


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")

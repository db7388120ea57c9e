"""Plan a run from the nodes' facts, with a given profile if there is one, or keep a resumed run's plan."""

from __future__ import annotations

import json
from collections.abc import Mapping

from coordinator.drive.checkpointing import Checkpointing
from coordinator.drive.requests import RunRequest
from coordinator.planner.given_profile import check_given, with_given_times
from coordinator.planner.make_plan import Planned, make_plan
from coordinator.records.events import EventSink
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.v1 import control_pb2


def plan_run(
    request: RunRequest, facts: Mapping[str, NodeFacts], checkpoints: Checkpointing, emit: EventSink
) -> tuple[Planned, Profile]:
    """Plan a run, and tell the submitter what it is planned with.

    Args:
        request: what is asked for.
        facts: of each node.
        checkpoints: of the run; they have a plan to keep if it goes on.
        emit: sends an event to the submitter.

    Returns:
        The plan, and the profile that it was made with.

    Raises:
        RingTuneError: no plan fits, or the one to keep does not.
    """
    evaluation = request.evaluation
    if evaluation is not None:
        facts = evaluation.narrow(facts)
    given = request.profile
    profile = with_given_times(facts, given) if given else Profile(nodes=tuple(facts[n] for n in sorted(facts)))
    facts = profile.by_name
    emit(control_pb2.RunEvent(profile_json=json.dumps(profile.to_json())))
    kept = checkpoints.planned(facts)
    is_evaluation = evaluation is not None
    planned = kept or make_plan(request.job, facts, links=profile.links, evaluation_only=is_evaluation)
    if given is not None:
        check_given(given, facts, request.job, planned.plan)
    checkpoints.note_model(facts, planned.plan)
    emit(control_pb2.RunEvent(plan_json=json.dumps(planned.plan.to_json())))
    return planned, profile

"""A profile that the user gives replaces new measurements of times and links; rows and memory are those of today."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from ringtune.costs.measured.measuring import job_shape
from ringtune.costs.measured.profile_match import check_profile
from ringtune.costs.profile import NodeFacts, Profile
from ringtune.errors import PlanError
from ringtune.files.given_files import read_json
from ringtune.jobs.job import Job
from ringtune.schedule.plan import Plan

_MEASURED = (
    "block_forward_s",
    "block_graph_s",
    "block_backward_s",
    "activation_token_bytes",
    "lowest_token_bytes",
    "hardware",
    "shape",
    "work_times",
    "has_messages",
    "rested_s",
    "handling_s",
    "message_s_per_byte",
)


def read_profile(path: Path) -> Profile:
    """Read a ``profile.json``.

    Raises:
        PlanError: it is not there, no JSON, or of another schema.
    """
    try:
        return Profile.from_json(read_json(path))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"can't read the profile {path}: {error}; make it with 'ringtune measure'") from error
    except ValueError as error:
        raise PlanError(f"the profile {path} is not JSON: {error}; make it with 'ringtune measure'") from error
    except PlanError as error:
        raise PlanError(f"the profile {path}: {error}") from error


def with_given_times(facts: Mapping[str, NodeFacts], given: Profile) -> Profile:
    """Merge what nodes say of themselves today with the times and links of the given profile.

    Args:
        facts: of every node that takes part, not measured.
        given: has all of them; more do no harm.

    Raises:
        PlanError: a node is missing.
    """
    missing = sorted(set(facts) - set(given.by_name))
    if missing:
        raise PlanError(f"the profile lacks node {', '.join(missing)}; measure anew with 'ringtune measure'")
    nodes = []
    for name in sorted(facts):
        times = {key: getattr(given.by_name[name], key) for key in _MEASURED}
        nodes.append(dataclasses.replace(facts[name], **times))
    links = tuple(link for link in given.links if link.source in facts and link.target in facts)
    return Profile(nodes=tuple(nodes), links=links)


def check_given(given: Profile, facts: Mapping[str, NodeFacts], job: Job, plan: Plan) -> None:
    """Refuse a given profile that was measured for another model or for another shape of batches.

    Raises:
        PlanError: names node and values.
    """
    model = facts[plan.nodes[0]].model
    used = Profile(nodes=tuple(node for node in given.nodes if node.node in facts))
    shape = job_shape(job, fixed_tokens=model.fixed_tokens)
    check_profile(used, plan.course, model_digest=model.digest, shape=shape)

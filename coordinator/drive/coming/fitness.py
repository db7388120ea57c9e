"""Whether a node that comes in mid-run fits it, and what is known of its links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.drive.requests import RunRequest
from coordinator.members.recruiting import Members, machine_of
from coordinator.members.registry import Member
from ringtune.costs.equal_copies import refuse_unlike_copies
from ringtune.costs.links.assumed import with_assumed
from ringtune.costs.measured.measuring import hidden_bytes
from ringtune.costs.profile import LinkFacts, NodeFacts, Profile
from ringtune.errors import PlanError
from ringtune.schedule.plan import Plan


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a run's nodes.

    Attributes:
        plan: of the run, as it was made; what nodes own in it stays.
        facts: of its nodes, by name: those that are lost too.
    """

    plan: Plan
    facts: Mapping[str, NodeFacts]


def why_refused(facts: NodeFacts, known: Known) -> str:
    """Why a node can't take part; empty if it can.

    Its base model has to be that of the others. An owner's rows have to be those that the plan counts, and copies that
    it has of embedding and head are updated as those of the other owners.
    """
    model = known.facts[known.plan.nodes[0]].model
    if facts.model.digest != model.digest:
        return (
            f"it has model {facts.model.digest[:12]}…, the run has {model.digest[:12]}…; put the same folder there, or "
            "start it without --model"
        )
    before = known.facts.get(facts.node)
    if known.plan.owner(facts.node) is None or before is None:
        return ""
    rows, had = (facts.train_rows, facts.eval_rows), (before.train_rows, before.eval_rows)
    if rows != had:
        return (
            f"it has {rows[0]} training and {rows[1]} evaluation rows, the run began with {had[0]} and {had[1]}; start "
            "it again with the same data"
        )
    labels = (facts.labels, facts.eval_labels, facts.users)
    if labels != (before.labels, before.eval_labels, before.users):
        return "its rows have other labels or users than when the run began; start it again with the same data"
    if known.plan.course.method.full_parameters:  # replicas are placed by what nodes are now
        try:
            refuse_unlike_copies(known.plan, {**known.facts, facts.node: facts})
        except PlanError as error:
            return str(error)
    return ""


def links_of(
    member: Member, facts: NodeFacts, profile: Profile, members: Members, request: RunRequest
) -> tuple[LinkFacts, ...]:
    """The links between a comer and the nodes of a profile: as given, remembered or assumed as at a start.

    None where the profile has none, as that of nodes whose links nobody knows.
    """
    others = {one.node: one for one in members.living() if one.node in profile.by_name and one.node != member.node}
    if not profile.links:
        return ()
    everybody = {**others, member.node: member}
    addresses = {name: one.address for name, one in everybody.items()}
    measured = [link for link in profile.links if not link.is_assumed and member.node not in (link.source, link.target)]
    remembered = members.links.find(addresses, hidden_bytes(request.job, facts.model))
    given = request.profile.links if request.profile is not None else ()
    machines = {name: machine_of(one) for name, one in everybody.items()}
    found = with_assumed(tuple(addresses), machines, (*measured, *remembered, *given))
    return tuple(link for link in found if member.node in (link.source, link.target))

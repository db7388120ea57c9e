"""Who helps whom, in words: which blocks, how many bytes a step, and what the result is."""

from __future__ import annotations

from collections.abc import Sequence

from ringtune.costs.kind_facts import KindFacts
from ringtune.costs.offload.traffic import step_traffic
from ringtune.costs.profile import NodeFacts
from ringtune.quantities import format_bytes
from ringtune.schedule.extent import users_text
from ringtune.schedule.helping.offload import ALONE, COLLABORATION, EXACT
from ringtune.schedule.plan import Plan
from ringtune.schedule.whose_rows.users import rows_by_user, user_sets

_MOST_NAMED = 20
_USERS = {
    ALONE: "train adapters of their own, which only their rows go through",
    COLLABORATION: "train adapters of their own, and every row goes through the sum of all",
}
_MANNERS = {"bfloat16": "rounded to 16 bits", "velora": "with projections of inputs"}


def helper_lines(plan: Plan, facts: NodeFacts | None = None) -> list[str]:
    """Say who helps whom; none where each host fits its own adapters.

    Args:
        plan: of the run.
        facts: of any node, for the bytes; None = they are not told.
    """
    placement = plan.placement
    lines = []
    for one in placement.joined_helpers():
        sent = ""
        if facts is not None:
            pairs, weights = step_traffic(plan, one, facts)
            sent = f": at most {format_bytes(pairs)} of pairs a step, {format_bytes(weights)} of weights an update"
        lines.append(f"{one.node} fits the adapters of {placement.host_of(one.start)}'s blocks {one.text}{sent}")
    kinds = facts.model.kinds if facts is not None else ()
    return [*lines, *_user_lines(plan, kinds), _result(plan)] if lines else []


def _user_lines(plan: Plan, kinds: Sequence[KindFacts]) -> list[str]:
    """Name the users that have adapters of their own, with their rows, of many the first ones; and who has which."""
    if not user_sets(plan.course):
        return []
    users = user_sets(plan.course)
    own = [f"{kind.config}: {_named([user for user in users if user in kind.users])}" for kind in kinds]
    own = [f"adapters in place of the job's: {'; '.join(own)}"] if own else []
    return [f"users, with training and evaluation rows: {users_text(rows_by_user(plan.course))}", *own]


def _named(users: Sequence[str]) -> str:
    more = f" and {len(users) - _MOST_NAMED} more" if len(users) > _MOST_NAMED else ""
    return f"{', '.join(users[:_MOST_NAMED])}{more}"


def _result(plan: Plan) -> str:
    offload = plan.course.offload
    if offload is None:
        return "helpers fit after every step from exact pairs: the result is that of a run without helpers"
    said: list[str] = []
    if users := user_sets(plan.course):
        said.append(f"{len(users)} users {_USERS[offload.users]}")
    if offload.interval > 1:
        said.append(f"helpers add up {offload.interval} steps for one update")
    if offload.pairs != EXACT:
        said.append(f"pairs travel {_MANNERS[offload.pairs]}")
    if offload.merged:
        said.append("hosts hold the adapters inside matrices, with the rounding of these")
    if offload.overlap:
        said.append("hosts don't wait, so that these adapters are one step behind within a turn")
    return f"{'; '.join(said)}: the result is not that of a run without helpers"

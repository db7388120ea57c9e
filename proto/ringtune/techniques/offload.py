"""Offload (ColA): the job's section, the helpers of a plan, the rows of users with own adapters, trials and report.

An owner's rows are in the order of its users: with 3 rows of anna and 5 of ben, the rows 0 to 2 are anna's. So every
node derives the user of a row from the course, and no message names it.

Source: ColA, section 4.3 and Table 4 (joint, alone, collaboration).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple

from ringtune.config.sections import MAX_STEPS, Adapter, Data, Train
from ringtune.errors import ContradictionError, JobError, PlanError
from ringtune.models.adapter_config import invertible_of, parse_adapter_config, trains_own_weights
from ringtune.models.adapter_support import merged_refusal, offload_refusal
from ringtune.models.family import IMAGE_CLASSIFICATION
from ringtune.quantities import format_bytes
from ringtune.schedule.batches import eval_rows
from ringtune.schedule.course import (
    ALL_INPUTS,
    ALONE,
    COLLABORATION,
    EXACT,
    IN_STEP,
    JOINT,
    PAIRS,
    PROJECTED,
    USERS,
    WIDE,
    Course,
    HelperSettings,
    stream_of,
)
from ringtune.schedule.operation_tables import ScoredWeights
from ringtune.schedule.placement import Helper, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Extent, Owner, UserRows, check_user_name, users_text
from ringtune.schedule.turns import Item, StepKind, items, turn_sequence
from ringtune.schedule.units import Range
from ringtune.storage.strict import Bounds, InWords, OneOf, check_fields, nearest, to_table
from ringtune.techniques.activation_checkpointing import BOTH, VELORA
from ringtune.techniques.base import Technique
from ringtune.techniques.operations import operations_of
from ringtune.texts import listed

OFF: Final = "off"
AUTO: Final = "auto"
MODES: Final = (OFF, AUTO)


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadSettings:
    """``[offload]``: whether other nodes fit the adapters of a host, from its pairs of inputs and output gradients.

    Attributes:
        mode: off = each host fits its own adapters; auto = the planner lets a node help where the step is predicted to
            be faster, or nothing fits otherwise, and none where the rest of the job allows no helper; a table of host =
            helper, as in ``{"pi-1" = "laptop"}``, names them.
        interval: steps whose gradients a helper adds up for one update; above 1 the result is another one.
        pairs: how pairs travel: as they were computed, rounded to 16 bits, or with projections of inputs; all but
            float32 change the result.
        merged: whether hosts hold linear adapters inside the matrices beside them, so that their memory does not
            depend on the adapters; the result has the rounding of a matrix.
        overlap: whether a host goes on to the next step of its turn before its helper has updated; its adapters are one
            step behind then, and the result is another one.
        users: joint = all rows train one set of adapters; alone = each user's rows train a set of their own;
            collaboration = they do, and every row goes through the sum of all sets.
        adapters: adapter configurations of single users, as in ``{"anna" = "linear"}``, who have them in place of
            ``adapter.config``.
        projected: which inputs ``pairs = "velora"`` projects: those that are wider than the gradient that is sent with
            them, as at ``down``, or all.
    """

    mode: Annotated[str | dict[str, str], InWords("off, auto, or a table of host = helper")] = field(default=OFF)
    interval: Annotated[int, Bounds(ge=1, le=MAX_STEPS)] = 1
    pairs: Annotated[str, OneOf(PAIRS)] = EXACT
    merged: bool = False
    overlap: bool = False
    users: Annotated[str, OneOf(USERS)] = JOINT
    adapters: Annotated[dict[str, str] | None, InWords("a table of user = adapter.config")] = None
    projected: Annotated[str, OneOf(PROJECTED)] = WIDE

    def __post_init__(self) -> None:
        """Refuse unknown words, an interval out of range, odd tables, and hosts that would help themselves."""
        if isinstance(self.mode, str):
            _check_mode(self.mode)
        else:
            _check_map(self.mode)
        check_fields(self, where="offload", error=JobError)
        others = {**dataclasses.asdict(IN_STEP), "projected": WIDE}
        odd = [name for name, value in others.items() if getattr(self, name) != value]
        if not self.is_on and odd:
            name = odd[0]
            raise JobError(
                f"offload.{name} = {getattr(self, name)!r} has no meaning with offload.mode = 'off'; set offload.mode, "
                "or remove it"
            )
        if self.projected != WIDE and self.pairs != VELORA:
            raise JobError(
                f"offload.projected = {self.projected!r} has no meaning with offload.pairs = {self.pairs!r}; remove "
                f"it, or set offload.pairs = {VELORA!r}"
            )
        try:
            _ = self.helper_settings
            for user in self.chosen_adapters:
                check_user_name(user)
        except PlanError as error:  # users exclude or need merged adapters, or a user name is invalid
            raise JobError(str(error)) from error
        if self.adapters is not None and not self.adapters:
            raise JobError("offload.adapters is an empty table; name an adapter for a user, or remove it")
        if self.adapters and self.users == JOINT:
            raise JobError(
                f"offload.adapters has no meaning with offload.users = {JOINT!r}, where all users train the same "
                f"adapters; remove it, or set offload.users = {ALONE!r}"
            )

    @property
    def is_on(self) -> bool:
        """Whether any node may help another."""
        return self.mode != OFF

    @property
    def may_be_left_out(self) -> bool:
        """Whether a job for which no helper is possible trains without: ``auto``, and one set of adapters for all."""
        return self.mode == AUTO and not self.helper_settings.has_users

    @property
    def is_exact(self) -> bool:
        """Whether the result equals that of a run without helpers."""
        return self.helper_settings.is_exact

    @property
    def helper_settings(self) -> HelperSettings:
        """The settings that change how helpers fit."""
        return HelperSettings(
            interval=self.interval,
            pairs=self.pairs,
            merged=self.merged,
            overlap=self.overlap,
            users=self.users,
            projected=self.projected if self.pairs == VELORA else ALL_INPUTS,
        )

    @property
    def chosen_adapters(self) -> Mapping[str, str]:
        """User -> adapter configuration, where it differs from ``adapter.config``."""
        return self.adapters or {}

    @property
    def helpers(self) -> Mapping[str, str]:
        """Host -> helper as named in the job; empty with off and auto."""
        return {} if isinstance(self.mode, str) else self.mode


def check_job(job: Any) -> None:
    """Refuse a job with helpers that its other sections exclude, or with users that nothing is trained for.

    With ``auto`` and one set of adapters for all rows such a job goes without helpers (``unhelped_reason``).
    """
    settings = job.offload
    problem = "" if settings.may_be_left_out else unhelped_reason(job)
    if problem := problem or _merged_problem(job):
        has_adapters = not (job.method.full_parameters or trains_own_weights(job.adapter.config))
        kind = JobError if has_adapters else ContradictionError
        raise kind(f"[offload] can't go with {problem}, or set offload.mode = 'off'")
    check_user_column(job.data, settings, task=job.model.task)


def unhelped_reason(job: Any) -> str:
    """Say which other setting of a job excludes helpers, with the remedy; empty if none does, or they are off."""
    settings, method, train = job.offload, job.method, job.train
    if not settings.is_on:
        return ""
    name = f"train.method = {train.method!r}"
    if method.full_parameters:
        return f"{name}, which trains all parameters, and helpers fit adapters only; choose another method"
    probe = Extent(num_blocks=2, owners=(), num_steps=1, local_iterations=train.local_iterations)
    if method.in_flight_below(probe, 2) > 1:
        return (
            f"{name}, which keeps several versions of adapters, and a helper sends the newest only; choose 'ringada' "
            "or 'all'"
        )
    for where, config in _configs(settings, job.adapter).items():
        if problem := offload_refusal(config, dropout=train.dropout):
            return f"{where}: {problem}"
        if settings.helper_settings.has_users and invertible_of(config) is not None:
            return (
                f"{where}: {config!r} has an invertible adapter, which is one for all users, beside adapters of each; "
                "use seq_bn or double_seq_bn"
            )
    operations = operations_of(job)
    has_subnets = operations.heads > 0 and not operations.by_slice
    of_adapters = operations.scores == ScoredWeights.ADAPTER or settings.merged or settings.users != JOINT
    if operations.is_chosen and (has_subnets or of_adapters):
        return (
            f"operations.policy = {operations.policy!r}, unless it is for whole blocks (operations.heads = 0), with "
            "scores of base weights and one set of adapters, which is not merged; set operations.policy = 'standard', "
            "or give operations.table"
        )
    has_velora = job.memory.activations in (VELORA, BOTH) or job.velora is not None
    if has_velora and settings.mode == AUTO:
        return (
            "VeLoRA (memory.activations, [velora]), which is for weights that their host trains; name the hosts that "
            "shall have helpers in offload.mode, or keep one of them: offload.pairs = 'velora' projects what is sent"
        )
    return ""


def _merged_problem(job: Any) -> str:
    """Say why the adapters can't be held inside the matrices, as the job asks; empty if they can."""
    settings, dropout = job.offload, job.train.dropout
    for where, config in _configs(settings, job.adapter).items() if settings.merged else ():
        if not offload_refusal(config, dropout=dropout) and (problem := merged_refusal(config, dropout=dropout)):
            both = f" and offload.users = {ALONE!r}" if settings.users == COLLABORATION else ""
            of_user = f" ({where})" if settings.chosen_adapters else ""
            return f"offload.merged: {problem}{both}{of_user}"
    return ""


def check_user_column(data: Data, settings: OffloadSettings, *, task: str) -> None:
    """Refuse ``data.user`` where rows have no columns, or users have no adapters of their own; raises ``JobError``."""
    if not data.user:
        return
    if not data.user.strip():
        raise JobError(f"data.user is {data.user!r}; name a column, or remove it")
    if task == IMAGE_CLASSIFICATION:
        raise JobError(
            f"data.user = {data.user!r} has no meaning for model.task = {task!r}, where rows have no columns; remove "
            "it, so that all rows of a node are of one user with the node's name"
        )
    if settings.users == JOINT:
        raise JobError(
            f"data.user = {data.user!r} has no meaning with offload.users = {JOINT!r}, where all users train the same "
            f"adapters; remove it, or set offload.users = {ALONE!r}"
        )


def check_fused(settings: OffloadSettings, *, adapter: Adapter, train: Train, fused: bool) -> None:
    """Refuse adapters that a helper can't fit in a model with a fused query, key and value matrix."""
    if not settings.is_on or settings.may_be_left_out:
        return
    for where, config in _configs(settings, adapter).items():
        if problem := offload_refusal(config, dropout=train.dropout, fused=fused):
            raise JobError(f"[offload] can't go with {where}: {problem}, or set offload.mode = 'off'")


def _configs(settings: OffloadSettings, adapter: Adapter) -> dict[str, str]:
    own = {f"offload.adapters.{user}": config for user, config in settings.chosen_adapters.items()}
    for where, config in own.items():
        try:
            parse_adapter_config(config)
        except JobError as error:
            raise JobError(f"{where}: {error}") from error
    return {"the adapter": adapter.config, **own}


def _check_mode(mode: str) -> None:
    try:
        OneOf(MODES).check("offload.mode", mode, JobError)
    except JobError as error:
        raise JobError(f"{error}; a table names helpers: offload.mode = {{{mode!r} = 'laptop'}}") from error


def _check_map(helpers: Mapping[str, str]) -> None:
    if not helpers:
        raise JobError("offload.mode is an empty table; name a helper for a host, or set offload.mode = 'off'")
    for host, helper in helpers.items():
        if not (host and helper):
            raise JobError("offload.mode has an empty name of a node; write host = helper, as 'pi-1' = 'laptop'")
        if host == helper:
            raise JobError(
                f"offload.mode.{host} = {helper!r}: a node can't help itself; name another one, or leave it out"
            )


def helped(plan: Plan, helper_of: Mapping[str, str], settings: HelperSettings = IN_STEP) -> Plan:
    """Set the helper of each named host for every block of its slices that may train; others have none.

    Each block is a range of its own, so that pairs of upper blocks travel, and their weights return, while lower blocks
    still go backward. Example: with the slices [0, 2) of a and [2, 4) of b, ``{"a": "z"}`` gives the helper z the
    ranges [0, 1) and [1, 2).
    """
    free = dataclasses.replace(plan.course, offload=None)
    placements = tuple(
        dataclasses.replace(one, helpers=helpers_of(free, one.hosts, helper_of)) for one in plan.placements
    )
    offload = settings.of_blocks({Range(one.start, one.stop) for each in placements for one in each.helpers})
    if (placements, offload) == (plan.placements, plan.course.offload):
        return plan
    return Plan(dataclasses.replace(plan.course, offload=offload), placements)


def helpers_of(course: Course, hosts: Iterable[Slice], helper_of: Mapping[str, str]) -> tuple[Helper, ...]:
    """Return a helper for every block of the named hosts that may train, ascending; see ``helped``.

    If helpers change the result, only of those that the course lets them fit.
    """
    return tuple(
        Helper(node=helper_of[piece.node], start=block, stop=block + 1)
        for piece in hosts
        if piece.node in helper_of
        for start, stop in course.trainable.ranges_within(piece.start, piece.stop)
        for block in range(start, stop)
        if course.offload is None or course.offload.has_block(block)
    )


def _placed(job: Any, plan: Plan) -> Plan:
    """Return the plan, which has its helpers already; raise ``PlanError`` where it lacks some that the job asks for."""
    settings = job.offload
    if not plan.course.num_steps:
        return plan
    if settings.mode == AUTO and (problem := unhelped_reason(job)):
        raise PlanError(f"offload.mode = {AUTO!r} can't go with {problem}")
    if idle := [host for host in settings.helpers if host not in helpers_by_host(plan)]:
        raise PlanError(f"offload.mode names some for {', '.join(idle)}, where no block trains")
    return plan


def check_plan(job: Any, plan: Plan) -> None:
    """Refuse a given plan with other helpers than its job names; with ``auto`` any helpers are accepted."""
    wish = job.offload
    has, wanted = plan.course.helper_settings, job.offload.helper_settings
    helps = bool(plan.placement.helpers)
    if (helps or wanted.has_users) and has != wanted:
        text = f"helpers with {_settings_text(has)}" if helps else "no helpers"
        raise PlanError(f"the plan has {text}, the job says {_settings_text(wanted)}; plan anew, or change [offload]")
    if wish.mode != AUTO and helped(plan, wish.helpers, wish.helper_settings) != plan:
        raise PlanError(
            f"the plan has {_text(helpers_by_host(plan))}, the job says offload.mode = {_text(wish.helpers)} with "
            f"{_settings_text(wish.helper_settings)}; plan anew, or change [offload]"
        )


def _settings_text(settings: HelperSettings) -> str:
    more = [word for word, is_so in (("merged", settings.merged), ("overlap", settings.overlap)) if is_so]
    more += [f"users {settings.users}"] if settings.has_users else []
    pairs = f"{settings.pairs} ({settings.projected})" if settings.pairs == VELORA else settings.pairs
    return ", ".join([f"interval {settings.interval}", f"pairs in {pairs}", *more])


def _text(helper_of: object) -> str:
    return str(helper_of) if helper_of else "no helpers"


def named_helpers(settings: OffloadSettings, known: Collection[str]) -> Mapping[str, str]:
    """The helper of each host that a job names; ``known`` are the names of all nodes; raises ``JobError``."""
    for host, helper in settings.helpers.items():
        for name in (host, helper):
            if name not in known:
                advice = nearest(name, known)
                raise JobError(f"offload.mode.{host} = {helper!r}: no node of this run has the name {name!r}; {advice}")
    return settings.helpers


def helpers_by_host(plan: Plan) -> dict[str, str]:
    """Host -> helper, as ``helped`` takes it; of several helpers of a host that of its lowest blocks."""
    placement = plan.placement
    return {placement.host_of(one.start): one.node for one in reversed(placement.helpers)}


class UserRowUse(NamedTuple):
    """The use of one user's rows in training.

    Attributes:
        trained_rows: rows of all batches, counted each time.
        updates: of the user's adapters; steps without a row of the user do not update them.
    """

    trained_rows: int
    updates: int


RowsOfUser = tuple[str, tuple[int, ...]]
"""A user, and the ascending positions of their rows in a micro-batch."""


def rows_by_user(course: Course) -> tuple[UserRows, ...]:
    """Count the rows of each user at all owners together, in the order of ``Course.users``."""
    found = {name: [0, 0] for name in course.users}
    for owner in course.owners:
        for user in owner.user_rows:
            found[user.name][0] += user.train_rows
            found[user.name][1] += user.eval_rows
    return tuple(UserRows(name=name, train_rows=train, eval_rows=held_out) for name, (train, held_out) in found.items())


def max_changed(course: Course) -> int:
    """Upper bound of the users with adapters that one update changes: one for each row, in each step of an interval."""
    offload = course.offload
    if offload is None or not offload.has_users:
        return 1
    of_step = max(min(len(owner.user_rows), course.batch_rows(owner)) for owner in course.owners)
    return min(len(course.users), of_step * offload.interval)


def uses_of_users(course: Course, steps: int) -> dict[str, UserRowUse]:
    """Count the use of rows in the first ``steps`` steps, for each user with adapters of their own.

    Steps of an unfinished interval count rows but no update, except at the end of the run.
    """
    offload, users = course.offload, course.user_sets
    if offload is None or not users:
        return {}
    rows, updates, waiting = dict.fromkeys(users, 0), dict.fromkeys(users, 0), set[str]()
    trained = (item for turn in turn_sequence(course) if turn.kind is StepKind.TRAIN for item in items(course, turn))
    for item in itertools.islice(trained, steps):
        owner = course.owner(item.owner)
        if owner is not None:
            for user in _users_at(owner, _rows(course, item, owner), is_training=True):
                rows[user] += 1
                waiting.add(user)
        if (item.step + 1) % offload.interval == 0 or item.step + 1 == course.num_steps:
            for user in waiting:
                updates[user] += 1
            waiting.clear()
    return {user: UserRowUse(rows[user], updates[user]) for user in users}


def rows_of_users(course: Course, item: Item, micro: int) -> tuple[RowsOfUser, ...]:
    """List the users of a micro-batch with the positions of their rows, in the order of ``Course.users``.

    Every position belongs to one user.
    """
    return _rows_of_users(course.plain, item, micro)


@functools.lru_cache(maxsize=4096)
def _rows_of_users(course: Course, item: Item, micro: int) -> tuple[RowsOfUser, ...]:
    sizes = course.microbatch_sizes(item.rows)
    first = sum(sizes[:micro])
    owner = course.owner(item.owner)
    if owner is None or len(owner.user_rows) == 1:
        return ((owner.user_rows[0].name if owner else item.owner, tuple(range(sizes[micro]))),)
    found: dict[str, list[int]] = {}
    own = _rows(course, item, owner)[first : first + sizes[micro]]
    for position, user in enumerate(_users_at(owner, own, is_training=item.kind is not StepKind.EVALUATE)):
        found.setdefault(user, []).append(position)
    return tuple((user, tuple(found[user])) for user in course.users if user in found)


def _rows(course: Course, item: Item, owner: Owner) -> Sequence[int]:
    if item.kind is StepKind.EVALUATE:
        return eval_rows(owner.eval_rows, course.batch_size, item.batch)
    return stream_of(course, owner.node).rows(item.batch)


def _users_at(owner: Owner, rows: Iterable[int], *, is_training: bool) -> list[str]:
    ends: list[tuple[int, str]] = []
    for user in owner.user_rows:
        before = ends[-1][0] if ends else 0
        ends.append((before + (user.train_rows if is_training else user.eval_rows), user.name))
    return [next(name for end, name in ends if row < end) for row in rows]


_MAX_NAMED = 20
_USERS = {
    ALONE: "train adapters of their own, which only their rows go through",
    COLLABORATION: "train adapters of their own, and every row goes through the sum of all",
}
_MANNERS = {"bfloat16": "rounded to 16 bits", "velora": "with projections of inputs"}


def helper_lines(
    plan: Plan, traffic: Callable[[Helper], Sequence[float]] | None = None, kinds: Sequence[Any] = ()
) -> list[str]:
    """Describe the helper of each host, and users of other ``kinds`` of adapters; empty without helpers."""
    placement = plan.placement
    lines = []
    for one in placement.joined_helpers():
        sent = ""
        if traffic is not None:
            pairs, weights = traffic(one)
            sent = f": at most {format_bytes(pairs)} of pairs a step, {format_bytes(weights)} of weights an update"
        lines.append(f"{one.node} fits the adapters of {placement.host_of(one.start)}'s blocks {one.text}{sent}")
    return [*lines, *_user_lines(plan, kinds), _result(plan)] if lines else []


def _user_lines(plan: Plan, kinds: Sequence[Any]) -> list[str]:
    """List the users with adapters of their own, with their rows and other adapter configurations."""
    if not plan.course.user_sets:
        return []
    users = plan.course.user_sets
    own = [f"{kind.config}: {listed([user for user in users if user in kind.users], _MAX_NAMED)}" for kind in kinds]
    own = [f"adapters in place of the job's: {'; '.join(own)}"] if own else []
    return [f"users, with training and evaluation rows: {users_text(rows_by_user(plan.course))}", *own]


def _result(plan: Plan) -> str:
    offload = plan.course.offload
    if offload is None:
        return "helpers fit after every step from exact pairs: the result is that of a run without helpers"
    said: list[str] = []
    if users := plan.course.user_sets:
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


def _plan_lines(plan: Plan) -> list[str]:
    has_helpers = bool(plan.placement.helpers)
    return ["pairs of adapters have hidden states in them, and travel to the helpers"] if has_helpers else []


def report(plan: Plan, steps: int) -> dict[str, Any]:
    """Describe the helpers of a run and their settings; empty for a run without helpers."""
    placement, settings = plan.placement, plan.course.helper_settings
    if not placement.helpers:
        return {}
    return {
        "offload": {
            "helpers": [
                {"node": one.node, "host": placement.host_of(one.start), "blocks": [one.start, one.stop]}
                for one in placement.joined_helpers()
            ],
            **to_table(settings),
            "staleness": "one step within a turn" if settings.overlap else "none",
            **_by_user(plan, steps),
        }
    }


def _by_user(plan: Plan, steps: int) -> dict[str, Any]:
    """Rows of each user and their use, where users have adapters of their own."""
    if not plan.course.user_sets:
        return {}
    rows = {user.name: {"train": user.train_rows, "eval": user.eval_rows} for user in rows_by_user(plan.course)}
    if plan.course.left_out:  # which turns each owner had follows from more than this course
        return {"rows_by_user": rows}
    uses = {user: use._asdict() for user, use in uses_of_users(plan.course, steps).items()}
    return {"rows_by_user": rows, "training_by_user": uses}


TECHNIQUE: Final = Technique(
    name="offload",
    course_fields=("offload",),
    later_keys={f"offload.{name}": value for name, value in dataclasses.asdict(OffloadSettings()).items()},
    check_job=check_job,
    check_model=lambda job, _, widths: check_fused(
        job.offload, adapter=job.adapter, train=job.train, fused=widths.merged
    ),
    placed=_placed,
    left_out="helpers are left out",
    check_plan=check_plan,
    # whoever fitted them, the adapters are in the result; the helpers that the job names need not be there
    evaluation_sections={"offload": OffloadSettings()},
    plan_lines=_plan_lines,
    helper_lines=helper_lines,
    report=report,
)

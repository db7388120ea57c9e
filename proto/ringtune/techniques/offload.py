"""Offload (ColA): the job's section, the helpers of a plan, the rows of users with own adapters, trials and report.

An owner's rows are in the order of its users: with 3 rows of anna and 5 of ben, the rows 0 to 2 are anna's. So every
node derives the user of a row from the course, and no message names it.

Memory: a host keeps no gradients and no optimizer state of adapters that a helper trains, but pairs until they are
sent: at most those of all micro-batches of one item (of two if the next item does not wait for an update), and one more
that is packed. If a block keeps more for its backward than its pairs, the pairs replace freed graphs, and only two
micro-batches of pairs are added. A helper holds adapters with gradients and state, and no other weights of the blocks;
pairs of ``WAITING`` micro-batches per link; and those in work twice, as received and as computed with. Weights to be
returned are at both ends; with overlap those of two updates. A host with merged adapters holds none in memory.
``costs.offload_costs`` has the sizes for users with adapters of their own.

Source: ColA, section 4.3 and Table 4 (joint, alone, collaboration).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, NamedTuple

from ringtune.config.sections import MAX_STEPS, Adapter, Data
from ringtune.errors import ContradictionError, JobError, PlanError
from ringtune.models.adapter_config import invertible_of, parse_adapter_config, trains_own_weights
from ringtune.models.adapter_support import merged_refusal, offload_refusal, places_of
from ringtune.models.auxiliary_models import INTERMEDIATE, OUTPUT
from ringtune.models.family import IMAGE_CLASSIFICATION, Family
from ringtune.quantities import format_bytes
from ringtune.schedule.actions import Payload
from ringtune.schedule.course import (
    ALL_INPUTS,
    ALONE,
    BFLOAT16,
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
)
from ringtune.schedule.lowering import WAITING
from ringtune.schedule.operation_tables import ScoredWeights
from ringtune.schedule.placement import Helper, Placement, Slice
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Extent, Owner, UserRows, check_user_name, users_text
from ringtune.schedule.saved_activations import VELORA, in_ranges, overlap, within
from ringtune.schedule.turns import Item, StepKind, items, microbatch_rows, rows_of, turn_sequence
from ringtune.schedule.units import Range
from ringtune.schedule.versions import ever_trained
from ringtune.storage.strict import Bounds, InWords, OneOf, check_fields, nearest, to_table
from ringtune.techniques.activation_checkpointing import BOTH
from ringtune.techniques.base import ANEW, Shape, Technique, Term
from ringtune.techniques.operations import operations_of
from ringtune.texts import listed

LOSSY: Final = tuple(wire for wire in PAIRS if wire != EXACT)
"""Encodings that change x; a bit for each unit of a ReLU, whether it was active at the host, is sent with it."""

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
        overlap: whether a host continues with the next step of its turn before its helper has updated; its adapters are
            one step behind then, and the result is another one.
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


def check_model(job: Any, shape: Shape) -> None:
    """Refuse adapters that no helper can fit in a model; raises ``JobError``."""
    settings, family = job.offload, shape.family
    if not settings.is_on or settings.may_be_left_out:
        return
    if family.generic and (role := unfitted_role(family, job.adapter_configs)):
        raise JobError(
            f"{shape.where}: a helper can't fit LoRA beside {getattr(family.layout, role)} of a {family.model_type}, "
            "whose input or output is not one for each token of a micro-batch; leave it out of adapter.config, or "
            "remove [offload]"
        )
    for where, config in _configs(settings, job.adapter).items():
        if problem := offload_refusal(config, dropout=job.train.dropout, fused=shape.widths.merged):
            raise JobError(f"[offload] can't go with {where}: {problem}, or set offload.mode = 'off'")


def unfitted_role(family: Family, configs: Iterable[str]) -> str:
    """Return a matrix beside which no helper can fit the adapters of some of these configurations; empty if none is."""
    names = {INTERMEDIATE: "up", OUTPUT: "down"}
    beside = {names.get(place, place) for config in configs for place in places_of(config)}
    return next((role for role in (*family.twice, *family.unfitted) if role in beside), "")


def _configs(settings: OffloadSettings, adapter: Adapter) -> dict[str, str]:
    of_users = {f"offload.adapters.{user}": config for user, config in settings.chosen_adapters.items()}
    for where, config in of_users.items():
        try:
            parse_adapter_config(config)
        except JobError as error:
            raise JobError(f"{where}: {error}") from error
    return {"the adapter": adapter.config, **of_users}


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
    placements = tuple(dataclasses.replace(at, helpers=helpers_of(free, at.hosts, helper_of)) for at in plan.placements)
    offload = settings.of_blocks({Range(lent.start, lent.stop) for each in placements for lent in each.helpers})
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


def check_plan(job: Any, plan: Plan, model: Any) -> None:
    """Refuse a given plan with other helpers than its job names; with ``auto`` any helpers are accepted."""
    wish = job.offload
    has, settings = plan.course.helper_settings, job.offload.helper_settings
    helps = bool(plan.placement.helpers)
    if (helps or settings.has_users) and has != settings:
        text = f"helpers with {_settings_text(has)}" if helps else "no helpers"
        raise PlanError(f"the plan has {text}, the job says {_settings_text(settings)}; plan anew, or change [offload]")
    if wish.mode != AUTO and helped(plan, wish.helpers, wish.helper_settings) != plan:
        raise PlanError(
            f"the plan has {_text(helpers_by_host(plan))}, the job says offload.mode = {_text(wish.helpers)} with "
            f"{_settings_text(wish.helper_settings)}; plan anew, or change [offload]"
        )
    if any(placement.helpers for placement in plan.placements) and not model.pair_token_bytes:
        raise PlanError(f"the plan has helpers, but none can fit this adapter.config in this model; {ANEW}")


def _settings_text(settings: HelperSettings) -> str:
    more = [word for word, is_so in (("merged", settings.merged), ("overlap", settings.overlap)) if is_so]
    more += [f"users {settings.users}"] if settings.has_users else []
    pairs = f"{settings.pairs} ({settings.projected})" if settings.pairs == VELORA else settings.pairs
    return ", ".join([f"interval {settings.interval}", f"pairs in {pairs}", *more])


def _text(helper_of: object) -> str:
    return str(helper_of) if helper_of else "no helpers"


def sent_pair_token_bytes(model: Any, wire: str) -> int:
    """Bytes per padded token of one block's pairs as sent, without VeLoRA's vectors.

    If users have several kinds of adapters, the maximum over the kinds.
    """
    return max([_of_kind(model, wire), *(_of_kind(kind, wire) for kind in model.kinds)])


def check_course(job: Any, _: Course, model: Any) -> None:
    """Refuse pairs with projections of wide inputs where no adapter has one; raises ``JobError`` with the bytes."""
    settings = job.offload
    if settings.pairs != VELORA or settings.projected == ALL_INPUTS:
        return
    exact, projected = (sent_pair_token_bytes(model, wire) for wire in (EXACT, VELORA))
    if exact and all(_of_kind(kind, VELORA) >= _of_kind(kind, EXACT) for kind in (model, *model.kinds)):
        raise JobError(
            f"offload.pairs = {VELORA!r} saves nothing with adapter.config = {job.adapter.config!r}: no input is wider "
            f"than the gradient beside it, so that a token of a block's pairs has {projected:,} bytes, not fewer than "
            f"{exact:,}; set offload.pairs = {BFLOAT16!r} ({sent_pair_token_bytes(model, BFLOAT16):,} bytes), add LoRA "
            "at down, or, at a loss of accuracy, set offload.projected = 'all'"
        )


def _of_kind(kind: Any, wire: str) -> int:
    of_wire = {BFLOAT16: kind.pair_rounded_token_bytes, VELORA: kind.pair_projected_token_bytes}
    return int(of_wire.get(wire, kind.pair_token_bytes))


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
    return {placement.host_of(helper.start): helper.node for helper in reversed(placement.helpers)}


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
    rows = {name: [0, 0] for name in course.users}
    for owner in course.owners:
        for user in owner.user_rows:
            rows[user.name][0] += user.train_rows
            rows[user.name][1] += user.eval_rows
    return tuple(UserRows(name=name, train_rows=train, eval_rows=held_out) for name, (train, held_out) in rows.items())


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
            for user in _users_at(owner, rows_of(course, item), is_training=True):
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
    owner = course.owner(item.owner)
    if owner is None or len(owner.user_rows) == 1:
        num_rows = microbatch_rows(course, item)[micro]
        return ((owner.user_rows[0].name if owner else item.owner, tuple(range(num_rows))),)
    positions: dict[str, list[int]] = {}
    rows = rows_of(course, item, micro)
    for position, user in enumerate(_users_at(owner, rows, is_training=item.kind is not StepKind.EVALUATE)):
        positions.setdefault(user, []).append(position)
    return tuple((user, tuple(positions[user])) for user in course.users if user in positions)


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
_MANNERS = {BFLOAT16: "rounded to 16 bits", VELORA: "with projections of inputs"}


def helper_lines(
    plan: Plan, traffic: Callable[[Helper], Sequence[float]] | None = None, kinds: Sequence[Any] = ()
) -> list[str]:
    """Describe the helper of each host, and users of other ``kinds`` of adapters; empty without helpers."""
    placement = plan.placement
    lines = []
    for each in placement.joined_helpers():
        sent = ""
        if traffic is not None:
            pairs, weights = traffic(each)
            sent = f": at most {format_bytes(pairs)} of pairs a step, {format_bytes(weights)} of weights an update"
        lines.append(f"{each.node} fits the adapters of {placement.host_of(each.start)}'s blocks {each.text}{sent}")
    return [*lines, *_user_lines(plan, kinds), _result(plan)] if lines else []


def _user_lines(plan: Plan, kinds: Sequence[Any]) -> list[str]:
    """List the users with adapters of their own, with their rows and other adapter configurations."""
    if not plan.course.user_sets:
        return []
    users = plan.course.user_sets
    texts = [f"{kind.config}: {listed([user for user in users if user in kind.users], _MAX_NAMED)}" for kind in kinds]
    texts = [f"adapters in place of the job's: {'; '.join(texts)}"] if texts else []
    return [f"users, with training and evaluation rows: {users_text(rows_by_user(plan.course))}", *texts]


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
                {"node": helper.node, "host": placement.host_of(helper.start), "blocks": [helper.start, helper.stop]}
                for helper in placement.joined_helpers()
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


def _parse_helpers(text: str, known: Collection[str]) -> dict[str, str]:
    """Parse ``pi-1=laptop+pi-2=laptop`` of ``--change offload`` (host = helper), or ``off`` for none.

    ``known`` are the names of all nodes. Raises ``PlanError``.
    """
    helpers: dict[str, str] = {}
    for part in text.split("+") if text != OFF else ():
        host, equals, helper = (word.strip() for word in part.partition("="))
        if not (host and equals and helper) or host in helpers:
            raise PlanError(
                f"--change offload={text}: write '{OFF}', or HOST=HELPER with each host once, several with + between"
            )
        for name in (host, helper):
            if name not in known:
                raise PlanError(f"--change offload={text}: there is no node {name!r}; {nearest(name, known)}")
        helpers[host] = helper
    return helpers


def _job_values(values: Mapping[str, int | str], known: Collection[str]) -> dict[str, object]:
    """Return the helpers that ``--change offload`` names; merged adapters where the setting of users requires them."""
    mode, users = values.get("offload", OFF), values.get("users", JOINT)
    helpers: dict[str, object] = {} if mode in MODES else {"offload.mode": _parse_helpers(str(mode), known)}
    return helpers if users == JOINT else {**helpers, "offload.merged": users == COLLABORATION}


def _changed(plan: Plan, values: Mapping[str, int | str], nodes: Sequence[Any]) -> Plan:
    """Set the helpers of a plan, and how users train adapters, merged where that setting requires it."""
    settings, users, helper_of = plan.course.helper_settings, values.get("users"), helpers_by_host(plan)
    if "offload" in values:
        helper_of = _parse_helpers(str(values["offload"]), [node.node for node in nodes])
        if helper_of and not all(node.model.pair_token_bytes for node in nodes):
            raise PlanError(
                f"--change offload={values['offload']}: the profile says nothing of pairs; no helper can fit these "
                "adapters, or measure anew with 'ringtune measure'"
            )
    elif users is None:
        return plan
    if users is None:
        return helped(plan, helper_of, settings)
    if not helper_of:
        raise PlanError(
            f"--change users={users}: helpers fit users' adapters, and there are none; change offload=HOST=HELPER too"
        )
    is_merged = settings.merged if users == JOINT else users == COLLABORATION
    shape = nodes[0].shape
    configs = {shape.adapter, *(kind.config for kind in nodes[0].model.kinds)} - {""}
    for config in sorted(configs) if is_merged else ():
        if problem := merged_refusal(config, dropout=shape.dropout):
            raise PlanError(f"--change users={users}: {problem}")
    return helped(plan, helper_of, dataclasses.replace(settings, users=str(users), merged=is_merged))


def _without_node(
    plan: Plan, node: str, placements: Sequence[Placement]
) -> tuple[Mapping[str, object], Sequence[Placement]]:
    """Give each host the helper that it has, for all of its blocks; none where that is the node."""
    free, helping = dataclasses.replace(plan.course, offload=None), list[Placement]()
    for before, after in zip(plan.parts, placements, strict=True):
        helper_of = {host: helper for host, helper in helpers_by_host(before).items() if node not in (host, helper)}
        helping.append(dataclasses.replace(after, helpers=helpers_of(free, after.hosts, helper_of)))
    settings = plan.course.helper_settings
    ranges = sorted({Range(lent.start, lent.stop) for each in helping for lent in each.helpers})
    lone = [helping[0].host_of(block) for block in free.trainable.blocks if not in_ranges(block, ranges)]
    if settings.has_users and lone:
        raise PlanError(
            f"--drop {node}: node {lone[0]} has no helper then, and helpers fit the adapters of users; "
            "give --replan JOB"
        )
    return {"offload": settings.of_blocks(ranges)}, helping


_AT_WORK = 2


def memory_terms(course: Course, share: Any, sizes: Any) -> Iterable[Term]:
    """Yield the terms of a node with helpers, and of a node that is a helper."""
    micro, trained = course.microbatch_sizes(), ever_trained(course)
    pair = round(sizes.pair_bytes(micro[0] * course.max_length))
    helped = overlap(trained.ranges, share.helped)
    settings = course.helper_settings
    waits = not (settings.overlap or settings.interval > 1)
    late = 0 if waits else len(micro)  # the next item has graphs again
    count = late + (_AT_WORK if _graphs_are_larger(course, share, sizes) else len(micro) + 1)
    yield Term("buffers", "pairs of a block until they are sent", helped * count, pair)
    updates = 2 if settings.overlap else 1
    num_fitted = sum(stop - start for start, stop in share.helped)
    yield Term("adapters", "adapter of a block that a helper fits", num_fitted, sizes.helped.hosted)
    yield Term("buffers", "adapter that a helper sent", updates * helped, sizes.helped.sent)
    links = [[overlap(trained.ranges, (lent,)) for lent in ranges] for ranges in share.helps]
    largest = [max(blocks) for blocks in links]
    waiting = WAITING[Payload.PAIRS] * sum(largest) + _AT_WORK * max(largest, default=0)
    fitted = sum(map(sum, links))
    hosted = sum(stop - start for ranges in share.helps for start, stop in ranges)
    yield Term("adapters", "adapter of a block that another node hosts", hosted, sizes.helped.held)
    both = sizes.helped.gradients + sizes.sets_state_bytes
    yield Term("optimizer", "gradient and moments of an adapter that is fitted for another node", fitted, both)
    yield Term("buffers", "pairs of a block that wait to be fitted", waiting, pair)
    yield Term("buffers", "adapter on its way to its host", updates * fitted, sizes.helped.sent)


def _graphs_are_larger(course: Course, share: Any, sizes: Any) -> bool:
    """Whether each helped block keeps more for its backward than its pairs, so that pairs replace freed graphs.

    For the micro-batch in its backward both are held, and for the one that is packed pairs twice.
    """
    if any(within(share.recompute, start, stop) for start, stop in share.helped):
        return False
    tokens = course.microbatch_sizes()[0] * course.max_length
    kept = min(sizes.kept_bytes(tokens), tokens * (sizes.lowest_token_bytes or math.inf))
    return bool(sizes.pair_bytes(tokens) <= kept)


TECHNIQUE: Final = Technique(
    name="offload",
    course_fields=("offload",),
    later_keys={f"offload.{name}": value for name, value in dataclasses.asdict(OffloadSettings()).items()},
    check_job=check_job,
    check_model=check_model,
    placed=_placed,
    left_out="helpers are left out",
    memory_terms=memory_terms,
    check_course=check_course,
    check_plan=check_plan,
    # whoever fitted them, the adapters are in the result; the helpers that the job names need not be there
    evaluation_sections={"offload": OffloadSettings()},
    plan_lines=_plan_lines,
    helper_lines=helper_lines,
    report=report,
    plan_keys={"offload": "offload.mode", "users": "offload.users"},
    job_values=_job_values,
    changed=_changed,
    without_node=_without_node,
)

"""What was decided for a run, as a value with a digest: slices, ring order, schedule parameters.

A plan is made once by the coordinator's planner and handed to every party. Nothing in it depends on
time; two parties that hold equal digests follow the same schedule.

Roles are independent: an *owner* has data, embedding and head; a *host* has a slice (maybe empty).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringtune.errors import PlanError
from ringtune.files.strict import read_dataclass

METHODS = ("ringada", "all", "pipeadapter", "single")
WIRE_DTYPES = ("float32", "bfloat16", "float16", "int8", "float64")
UNFREEZINGS = ("every", "at", "auto")
PATIENCE_STEPS = 20
MIN_IMPROVEMENT = 0.01
_LATER = {
    "unfreeze": "every",
    "unfreeze_at": (),
    "patience_steps": PATIENCE_STEPS,
    "min_improvement": MIN_IMPROVEMENT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """The blocks ``[start, stop)`` that one node hosts; empty if ``start == stop``."""

    node: str
    start: int
    stop: int

    @property
    def num_blocks(self) -> int:
        """How many blocks the slice holds."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A span of the run with fixed slices. For now a plan has exactly one."""

    slices: tuple[Slice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A node with data: how many rows it trains on and evaluates on."""

    node: str
    train_rows: int
    eval_rows: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A complete plan.

    Attributes:
        method: one of ``METHODS``.
        num_blocks: transformer blocks of the model, N.
        phases: exactly one; its slices are in ring order and cover ``[private_blocks, N)``.
        owners: in initiator order.
        num_steps: optimizer steps of the whole run; 0 = only an evaluation.
        local_iterations: steps of one turn.
        every_steps: RingAda unfreezes one more block every so many steps, if ``unfreeze`` is ``every``.
        batch_size: rows of one step.
        microbatches: parts of one batch; at most ``batch_size``.
        max_length: longest sequence in tokens; bounds the shape of every frame.
        hidden_size: width of the hidden state; bounds the shape of every frame.
        eval_every: steps between evaluations (at turn boundaries); 0 = at the end only.
        checkpoint_every: steps between checkpoints (at turn boundaries, and at the end); 0 = none.
        credits: tensors in flight per (link, boundary).
        wire_dtype: one of ``WIRE_DTYPES``.
        private_blocks: frozen blocks ``[0, p)`` that every owner runs itself.
        labels: agreed class names, sorted.
        seed: of the run.
        unfreeze: one of ``UNFREEZINGS``: when RingAda unfreezes one more block.
        unfreeze_at: for ``at`` these steps; empty for the others.
        patience_steps: for ``auto``: so many steps without improvement, see ``unfreezing``.
        min_improvement: for ``auto``: what counts as one, as a share of the best loss.
    """

    method: str
    num_blocks: int
    phases: tuple[Phase, ...]
    owners: tuple[Owner, ...]
    num_steps: int
    local_iterations: int
    every_steps: int
    batch_size: int
    microbatches: int
    max_length: int
    hidden_size: int
    eval_every: int = 0
    checkpoint_every: int = 0
    credits: int = 8
    wire_dtype: str = "float32"
    private_blocks: int = 0
    labels: tuple[str, ...] = ()
    seed: int = 0
    unfreeze: str = "every"
    unfreeze_at: tuple[int, ...] = ()
    patience_steps: int = PATIENCE_STEPS
    min_improvement: float = MIN_IMPROVEMENT

    def __post_init__(self) -> None:
        """Refuse a plan that breaks a rule which does not depend on the schedule."""
        _check(self)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The slices of the only phase, in ring order."""
        return self.phases[0].slices

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every node of the run: hosts in ring order, then owners that host nothing."""
        hosts = [piece.node for piece in self.slices]
        return tuple(hosts + [owner.node for owner in self.owners if owner.node not in hosts])

    def slice_of(self, node: str) -> Slice:
        """The slice of ``node``; an empty one if it hosts nothing."""
        for piece in self.slices:
            if piece.node == node:
                return piece
        return Slice(node=node, start=self.num_blocks, stop=self.num_blocks)

    def owner(self, node: str) -> Owner | None:
        """The owner entry of ``node``, or None if it has no data."""
        return next((owner for owner in self.owners if owner.node == node), None)

    def microbatch_sizes(self, rows: int | None = None) -> tuple[int, ...]:
        """Rows of each micro-batch of a batch of ``rows``; the first ones take the remainder.

        A short evaluation batch keeps the number of micro-batches unless it has fewer rows.
        """
        rows = self.batch_size if rows is None else rows
        parts = min(self.microbatches, rows)
        small, extra = divmod(rows, parts)
        return tuple(small + (1 if index < extra else 0) for index in range(parts))

    def eval_batches(self, owner: Owner) -> int:
        """Evaluation batches of one owner; the last one may be short."""
        return -(-owner.eval_rows // self.batch_size)

    @property
    def is_auto(self) -> bool:
        """Whether the run itself decides when blocks are unfrozen; each turn then says what holds for it."""
        return self.unfreeze == "auto" and self.method == "ringada"

    def unfrozen_at(self, steps: tuple[int, ...]) -> Plan:
        """The plan as it is where blocks are unfrozen at ``steps`` (``Turn.unfreeze_at``); equal steps give one object.

        Raises:
            PlanError: this plan does not leave that to the run, or the steps break a rule.
        """
        return _unfrozen_at(self, steps) if steps else self

    def to_json(self) -> dict[str, Any]:
        """A JSON-able form with the digest beside it."""
        return {**dataclasses.asdict(self), "digest": self.digest}

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON form, without the digest itself.

        A field that came after plans had been written is left out at its default: those plans keep their digest.
        """
        fields = dataclasses.asdict(self).items()
        value = {key: item for key, item in fields if key not in _LATER or item != _LATER[key]}
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Plan:
        """Read what ``to_json`` wrote.

        Raises:
            PlanError: a field is missing or unknown, a rule is broken, or the digest differs.
        """
        if not isinstance(value, Mapping):
            raise PlanError("the plan has to be a table; make it anew with 'ringtune plan'")
        fields = {key: item for key, item in value.items() if key != "digest"}
        plan = read_dataclass(Plan, fields, where="", error=PlanError)
        if value.get("digest", plan.digest) != plan.digest:
            raise PlanError("the plan's digest does not match its content; make it anew with 'ringtune plan'")
        return plan


@functools.lru_cache(maxsize=256)
def _unfrozen_at(plan: Plan, steps: tuple[int, ...]) -> Plan:
    if not plan.is_auto:
        raise PlanError(f"a turn says that blocks are unfrozen at {list(steps)}, but the plan settles that itself")
    return dataclasses.replace(plan, unfreeze="at", unfreeze_at=steps)


def _check(plan: Plan) -> None:
    if plan.method not in METHODS:
        raise PlanError(f"method {plan.method!r} is not one of {', '.join(METHODS)}")
    if plan.wire_dtype not in WIRE_DTYPES:
        raise PlanError(f"wire dtype {plan.wire_dtype!r} is not one of {', '.join(WIRE_DTYPES)}")
    if len(plan.phases) != 1:
        raise PlanError(f"a plan has exactly one phase for now, this one has {len(plan.phases)}")
    positive = ("num_blocks", "local_iterations", "every_steps", "batch_size", "microbatches", "credits")
    for name in (*positive, "max_length", "hidden_size"):
        if getattr(plan, name) < 1:
            raise PlanError(f"{name} is {getattr(plan, name)}, it has to be at least 1")
    for name in ("num_steps", "eval_every", "checkpoint_every"):
        if getattr(plan, name) < 0:
            raise PlanError(f"{name} is {getattr(plan, name)}, it has to be at least 0")
    if plan.microbatches > plan.batch_size:
        raise PlanError(f"{plan.microbatches} micro-batches do not fit a batch of {plan.batch_size} rows")
    _check_slices(plan)
    _check_unfreezing(plan)
    names = [owner.node for owner in plan.owners]
    if not names or len(set(names)) != len(names):
        raise PlanError(f"owners have to be at least one and distinct, not {names}")
    for owner in plan.owners:
        if owner.train_rows < 1:
            raise PlanError(f"owner {owner.node} has no rows; give it data or leave it out")
        if owner.eval_rows < 0:
            raise PlanError(f"owner {owner.node} has {owner.eval_rows} evaluation rows, it has to be at least 0")


def _check_unfreezing(plan: Plan) -> None:
    steps = plan.unfreeze_at
    if plan.unfreeze not in UNFREEZINGS:
        raise PlanError(f"unfreeze {plan.unfreeze!r} is not one of {', '.join(UNFREEZINGS)}")
    if steps and plan.unfreeze != "at":
        raise PlanError(f"unfreeze_at is {list(steps)}, it has to be empty where unfreeze is {plan.unfreeze!r}")
    if any(later <= earlier for earlier, later in itertools.pairwise((0, *steps))):
        raise PlanError(f"unfreeze_at is {list(steps)}, it has to be above 0 and strictly increasing")
    most = plan.num_blocks - plan.private_blocks - 1
    if len(steps) > most:
        private = f", {plan.private_blocks} of them private," if plan.private_blocks else ""
        raise PlanError(
            f"unfreeze_at has {len(steps)} steps, but of {plan.num_blocks} blocks{private} no more than {most} can be "
            "unfrozen, as the top one trains from the start; leave some out"
        )
    if plan.patience_steps < 1:
        raise PlanError(f"patience_steps is {plan.patience_steps}, it has to be at least 1")
    if not 0 <= plan.min_improvement < 1:
        raise PlanError(f"min_improvement is {plan.min_improvement}, it has to be in [0, 1)")


def _check_slices(plan: Plan) -> None:
    names = [piece.node for piece in plan.slices]
    if len(set(names)) != len(names):
        raise PlanError(f"a node hosts more than one slice: {names}")
    if not 0 <= plan.private_blocks < plan.num_blocks:
        raise PlanError(f"private_blocks is {plan.private_blocks}, it has to be in [0, {plan.num_blocks})")
    at = plan.private_blocks
    for piece in plan.slices:
        if piece.start != at and piece.num_blocks:
            kind = "gap" if piece.start > at else "overlap"
            raise PlanError(f"{kind} before block {piece.start} of node {piece.node}: expected block {at}")
        if piece.num_blocks < 0:
            raise PlanError(f"node {piece.node} has the reversed range [{piece.start}, {piece.stop})")
        at = piece.stop if piece.num_blocks else at
        if at > plan.num_blocks:
            raise PlanError(f"node {piece.node} hosts [{piece.start}, {at}), the model has {plan.num_blocks} blocks")
    if at != plan.num_blocks:
        raise PlanError(f"blocks [{at}, {plan.num_blocks}) have no host")

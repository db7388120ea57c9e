"""Plan: a course and its placements, made by the coordinator's planner and sent to every node.

Roles are independent: an *owner* has data, embedding and head; a *host* has a slice (maybe empty).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ringtune.errors import PlanError
from ringtune.schedule.course import TABLES_AT_ONCE, Course, Offload
from ringtune.schedule.migration import check_placements, first_step
from ringtune.schedule.operation_tables import Operations, ScoredWeights
from ringtune.schedule.placement import Helper, Placement, Rack, Slice
from ringtune.schedule.run_shape import Owner
from ringtune.schedule.saved_activations import in_ranges, merged, ranges_to_json, within
from ringtune.schedule.stages import check_replicas
from ringtune.schedule.units import Range
from ringtune.schedule.versions import may_be_stale
from ringtune.storage.strict import check_keys, json_digest

SCHEMA: Final = 2
_ANEW = "make it anew with 'ringtune plan'"


@dataclass(frozen=True, slots=True)
class Plan:
    """A course with its placements.

    Attributes:
        placements: in the order of their numbers. A plan with a single placement of a number above 0 is a part of a
            plan, which nodes get while that placement holds (``at``).
    """

    course: Course
    placements: tuple[Placement, ...]
    _hash: int = field(default=0, init=False, repr=False, compare=False)
    _plain: Plan | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        course = self.course
        check_placements(course, self.placements)
        for placement in self.placements:
            _check_helpers(course, placement)
            check_replicas(course, placement)
            if placement.cache is not None and (problem := no_cache_reason(course, bool(placement.helpers))):
                raise PlanError(f"hosts can't keep hidden states: {problem}; or leave the placement's cache out")
            for piece in placement.hosts:
                if piece.stop > course.num_blocks:
                    blocks = f"[{piece.start}, {piece.stop})"
                    raise PlanError(f"node {piece.node} hosts {blocks}, the model has {course.num_blocks} blocks")
            if (private := placement.private_blocks) > course.num_blocks:
                raise PlanError(f"private_blocks is {private}, the model has {course.num_blocks} blocks")
            if placement.stop < course.num_blocks:
                raise PlanError(f"blocks [{placement.stop}, {course.num_blocks}) have no host")
            if private > course.frozen_blocks:
                raise PlanError(
                    f"private_blocks is {private}, but only the lowest {course.frozen_blocks} blocks never train; "
                    "freeze as many"
                )
            for piece in placement.hosts:
                numbers = {course.method.in_flight(course, block) for block in range(piece.start, piece.stop)}
                if len(numbers) > 1:
                    raise PlanError(
                        f"the blocks [{piece.start}, {piece.stop}) of node {piece.node} may have {sorted(numbers)} "
                        "items in flight, but a slice has one number; plan anew"
                    )
        object.__setattr__(self, "_hash", hash((self.course, self.placements)))

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def of(course: Course, placement: Placement) -> Plan:
        """Make the plan of a course, after ``Course.fitted``, on one placement; raises ``PlanError``."""
        return Plan(course.fitted(placement.slices), (placement,))

    @property
    def placement(self) -> Placement:
        """The first placement, the only one unless the run moves."""
        return self.placements[0]

    @property
    def moves(self) -> bool:
        """Whether there are several placements."""
        return len(self.placements) > 1

    def at(self, placement_number: int) -> Plan:
        """Return the plan with one placement only; raises ``PlanError`` if there is none with this number."""
        return (
            self
            if not self.moves and placement_number == self.placement.placement_number
            else _part(self, placement_number)
        )

    @property
    def parts(self) -> tuple[Plan, ...]:
        """The part of every placement, in order."""
        return tuple(self.at(placement.placement_number) for placement in self.placements)

    def after(self, step: int) -> Plan:
        """Return the part in which a run continues after ``step`` steps."""
        held = [placement for placement in self.placements if first_step(self.course, placement) <= step]
        return self.at((held or self.placements[:1])[-1].placement_number)

    def extended(self, placement: Placement, first_turn: int, *, placement_number: int = 0) -> Plan:
        """Return the plan with one more placement from a train turn on, in place of later ones; raises ``PlanError``.

        Its number is the next one, or a given later one: after a recovery frames of all earlier placements are refused.
        """
        kept = tuple(each for each in self.placements if each.first_turn < first_turn)
        placement_number = placement_number or (kept[-1].placement_number + 1 if kept else 0)
        return Plan(
            self.course,
            (*kept, dataclasses.replace(placement, placement_number=placement_number, first_turn=first_turn)),
        )

    def replaced(self, course: Course, placements: Sequence[Placement]) -> Plan:
        """Combine changed course and placements, each from the turn with its former step on; raises ``PlanError``.

        Placements after the last step are left out, and so are equal successors. Example: a placement from step 15 on
        has turns of 5 steps and first turn 3; with turns of 10 steps its first turn is 2, step 20.
        """
        kept: list[Placement] = []
        for placement in placements:
            turn, last = -(-first_step(self.course, placement) // course.local_iterations), kept[-1] if kept else None
            if last and turn * course.local_iterations >= course.num_steps:
                break
            if last and last.first_turn == turn:
                kept.pop()
            elif last and last == dataclasses.replace(
                placement, placement_number=last.placement_number, first_turn=last.first_turn
            ):
                continue
            kept.append(dataclasses.replace(placement, first_turn=turn))
        # a method that depends on the ring gets the ring, and does not move
        return Plan.of(course, kept[0]) if len(kept) == 1 else Plan(course, tuple(kept))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every node of the run: hosts in ring order, by placement, then other owners, then other helpers."""
        hosts = [piece.node for placement in self.placements for piece in placement.slices]
        owners = [owner.node for owner in self.course.owners]
        helpers = [helper.node for placement in self.placements for helper in placement.helpers]
        return tuple(dict.fromkeys((*hosts, *owners, *helpers)))

    def has_role(self, node: str, since_placement_number: int) -> bool:
        """Whether a node is in the placement with this number, or in a later one.

        A lost node that is a member again is in none until then: its messages are of an earlier placement.
        """
        return any(
            node in part.nodes for part in self.parts if part.placement.placement_number >= since_placement_number
        )

    def slice_of(self, node: str) -> Slice:
        """Return the slice of ``node`` in the first placement; an empty one if it hosts nothing."""
        return self.placement.slice_of(node)

    def owner(self, node: str) -> Owner | None:
        """Return the owner entry of ``node``; None if it has no data."""
        return self.course.owner(node)

    def decided(self, steps: tuple[int, ...], operations: Operations | None = None) -> Plan:
        """Return the plan with the run's decisions filled in, see ``Course.decided``; ``self`` without any.

        Equal decisions give one object.
        """
        if operations is not None:
            return _with_table(self, steps, operations)
        return _decided(self, steps) if steps else self

    @property
    def plain(self) -> Plan:
        """The plan of the plain course; see ``Course.plain``."""
        return self._plain or self

    def soonest(self) -> Plan:
        """Return the plan of the course with the earliest possible decisions; see ``Course.soonest``.

        Upper bounds for every run, such as the memory of a node, are computed for this plan.
        """
        course = self.course.soonest()
        return self if course is self.course else Plan(course, self.placements)

    @property
    def goes_back(self) -> bool:
        """Whether nodes keep the ends of turns in memory, so that the run continues without a lost node.

        Where all parameters train, copies are of checkpoints, on disks: a run is resumed from them.
        """
        return self.placement.copies and not self.course.method.full_parameters

    def with_copies(self, copies: bool, num_copies: int = 0, racks: tuple[Rack, ...] = ()) -> Plan:
        """Return the plan with these fields set in every placement."""
        placements = (
            dataclasses.replace(placement, copies=copies, num_copies=num_copies, racks=racks)
            for placement in self.placements
        )
        return Plan(self.course, tuple(placements))

    # ---- files ------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Write as a JSON-compatible table, with the digests of all parts and of the whole."""
        return {
            "schema": SCHEMA,
            "course": {**self.course.to_json(), "digest": self.course.digest},
            "placements": [{**placement.to_json(), "digest": placement.digest} for placement in self.placements],
            "digest": self.digest,
        }

    def to_wire(self) -> str:
        """Write as JSON text for a node; see ``Placement.to_wire``."""
        placements = [{**placement.to_wire(), "digest": placement.digest} for placement in self.placements]
        return json.dumps({**self.to_json(), "placements": placements})

    @property
    def digest(self) -> str:
        """SHA-256 over the digests of course and placements."""
        return json_digest([self.course.digest, *(placement.digest for placement in self.placements)])

    @staticmethod
    def from_json(value: object) -> Plan:
        """Parse the table of ``to_json`` or ``to_wire``; raises ``PlanError``."""
        if not isinstance(value, Mapping):
            raise PlanError(f"the plan has to be a table; {_ANEW}")
        if value.get("schema") != SCHEMA:
            raise PlanError(
                f"plan schema {value.get('schema')!r} is not {SCHEMA}; {_ANEW}, or use the version that wrote it"
            )
        check_keys(value, ["schema", "course", "placements", "digest"], where="", error=PlanError)
        parts = value.get("placements")
        if not isinstance(parts, list):
            raise PlanError(f"the plan has no list of placements; {_ANEW}")
        course = Course.from_json(_without_digest(value.get("course")))
        placements = [
            Placement.from_json(_without_digest(part), where=f"placements[{at}]") for at, part in enumerate(parts)
        ]
        plan = Plan(course, tuple(placements))
        given = (value.get("course"), *parts, value)
        for part, digest in zip(
            given, (course.digest, *(placement.digest for placement in placements), plan.digest), strict=True
        ):
            if isinstance(part, Mapping) and part.get("digest", digest) != digest:
                raise PlanError(f"the plan's digest does not match its content; {_ANEW}")
        return plan


def _without_digest(value: object) -> object:
    return {key: item for key, item in value.items() if key != "digest"} if isinstance(value, Mapping) else value


@functools.lru_cache(maxsize=256)
def _part(plan: Plan, placement_number: int) -> Plan:
    for placement in plan.placements:
        if placement.placement_number == placement_number:
            return Plan(plan.course, (placement,))
    raise PlanError(
        f"the plan has no placement {placement_number}, it has {[each.placement_number for each in plan.placements]}"
    )


@functools.lru_cache(maxsize=256)
def _decided(plan: Plan, steps: tuple[int, ...]) -> Plan:
    return Plan(plan.course.decided(steps), plan.placements)


@functools.lru_cache(maxsize=TABLES_AT_ONCE)
def _with_table(plan: Plan, steps: tuple[int, ...], operations: Operations) -> Plan:
    decided = Plan(plan.course.decided(steps, operations), plan.placements)
    object.__setattr__(decided, "_plain", plan.decided(steps))
    return decided


def no_cache_reason(course: Course, has_helpers: bool) -> str:
    """Say why hosts of a run can't store outputs of its frozen prefix, with the remedy; empty if they can."""
    if course.method.full_parameters:
        return f"{course.method.name} trains all parameters, so that no prefix stays frozen; use an adapter"
    if course.may_skip:
        return "operation tables let each micro-batch pass other blocks; use operations.policy = 'standard'"
    if course.offload is not None or has_helpers:
        return "helpers fit the adapters of some blocks; use offload.mode = 'off'"
    return ""


def _check_helpers(course: Course, placement: Placement) -> None:
    ranges = merged(Range(helper.start, helper.stop) for helper in placement.helpers)
    if course.offload is not None and not _may_help(course.offload, ranges):
        raise PlanError(
            f"the course lets helpers fit the blocks {ranges_to_json(course.offload.blocks)}, the placement has "
            f"helpers for {ranges_to_json(ranges)}; plan anew"
        )
    if course.offload is not None and course.offload.has_users:
        lone = [block for block in course.trainable.blocks if not in_ranges(block, ranges)]
        if lone:
            raise PlanError(
                f"users have adapters of their own, which helpers fit, but block {lone[0]} has no helper; give every "
                "host one, or set offload.users = 'joint'"
            )
    for helper in placement.helpers:
        if problem := _no_help(course, helper):
            raise PlanError(f'node {helper.node} can\'t help: {problem}, or offload.mode = "off"')
        if helper.start < course.frozen_blocks:
            raise PlanError(
                f"helper {helper.node} has the blocks {helper.text}, but the lowest {course.frozen_blocks} never train"
            )


def _may_help(offload: Offload, ranges: Sequence[Range]) -> bool:
    """Whether helpers may be there for these blocks: for all of the course, or for some that hosts train alike."""
    if offload.needs_helpers:
        return merged(offload.blocks) == tuple(ranges)
    return all(offload.has_block(block) for start, stop in ranges for block in range(start, stop))


def _no_help(course: Course, helper: Helper) -> str:
    """Say why no helper can train adapters in such a run, with the remedy; empty if one can."""
    name = course.method.name
    if course.method.full_parameters:
        return f"{name} trains all parameters, and helpers fit adapters only; use an adapter"
    if may_be_stale(course):
        return f"{name} keeps several versions of adapters, and a helper sends the newest only; use ringada or all"
    if course.subnets > 1:
        return "pairs are of whole blocks, and the run has operations of subnets; set operations.heads = 0"
    choice, settings = course.choice, course.helper_settings
    of_adapters = choice is not None and choice.scored_weights == ScoredWeights.ADAPTER
    if choice is not None and (of_adapters or settings.merged or settings.has_users):
        return (
            "the run chooses operations by scores, which hosts have of base weights with one set of adapters that is "
            "not merged; give operations.table"
        )
    if within(course.projected, helper.start, helper.stop):
        return f"velora is for weights that the host trains, not for the blocks {helper.text}; leave them out of it"
    return ""

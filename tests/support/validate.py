"""Checks whether a table of actions carries turns out correctly: of the lowering, and of what a ring really did.

A plan that is read from a file has no table of its own: the table follows from course and placement, whose rules are
checked as they are read. So the lowering is what can be wrong, and tests check it for any plan. A refusal prints the
whole table with the bad cell marked.

Precedent: the validator of torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ringtune.errors import PlanError
from ringtune.schedule.actions import Action, Graph, Op, Payload, Scope, format_action, parse_action
from ringtune.schedule.course import Course
from ringtune.schedule.lowering import fit_legs, legs, lowest_units
from ringtune.schedule.plan import Plan
from ringtune.schedule.table import Table, build_table, format_table, message_of, replay
from ringtune.schedule.turns import Item, StartPoint, Turn, items
from ringtune.schedule.units import EMBEDDING
from ringtune.schedule.versions import backward_version, forward_version, weight_version


def validate_table(plan: Plan, turns: Iterable[Turn], table: Table, *, start: StartPoint | None = None) -> None:
    """Check that a table carries these turns out correctly, in whatever order it runs ahead.

    Every node has exactly the actions of the lowering; each receive has its send; nothing deadlocks; every
    forward sees its ``forward_version``, every head all updates; a backward follows its forward and the update of the
    item before, an update its backwards.
    """
    granted = tuple(turns)
    expected = build_table(plan, granted, start=start)
    for node in table.keys() | expected.keys():
        _check_actions(plan, table, node, table.get(node, ()), expected.get(node, ()))
    if not granted:
        return
    _check_messages(plan, table)
    for node in table:
        _check_versions(plan, granted, table, node, start.holder if start else granted[0].owner)


def _refuse(plan: Plan, table: Table, node: str, position: int, why: str) -> PlanError:
    num_blocks = plan.course.num_blocks
    here = [format_action(action, num_blocks) for action in table.get(node, ())[position : position + 1]]
    return PlanError(f"node {node}: {why}\naction {position}: {here} <-- here\n{format_table(table, num_blocks)}")


def _check_actions(plan: Plan, table: Table, node: str, actions: Sequence[Action], expected: Sequence[Action]) -> None:
    wanted = set(expected)
    seen: set[Action] = set()
    for position, action in enumerate(actions):
        if action not in wanted or action in seen:
            word = format_action(action, plan.course.num_blocks)
            raise _refuse(plan, table, node, position, f"{word} {'twice' if action in seen else 'is not in the plan'}")
        seen.add(action)
    missing = [action for action in expected if action not in seen]
    if missing:
        word = format_action(missing[0], plan.course.num_blocks)
        raise _refuse(plan, table, node, len(actions) - 1, f"{word} is missing")


def _check_messages(plan: Plan, table: Table) -> None:
    sent = {message_of(node, action) for node in table for action in table[node] if action.op is Op.SEND}
    for node, actions in table.items():
        for position, action in enumerate(actions):
            if action.op is Op.RECEIVE and message_of(node, action) not in sent:
                raise _refuse(plan, table, node, position, "this receive has no send")
    _, stuck = replay(table)
    if stuck:
        node, position = next(iter(stuck.items()))
        raise _refuse(plan, table, node, position, "deadlock: this action never becomes possible")


class _Column:
    """Walks one node's column with the number of updates that each of its units has had."""

    def __init__(self, plan: Plan, turns: Sequence[Turn], node: str, holder: str) -> None:
        self._node = node
        self._first_steps = {turn.index: (turn.settled(plan).course, turn.first_step) for turn in turns}
        course, step = self._first_steps[turns[0].index]
        piece = plan.slice_of(node)
        self._hosted = (piece.start, piece.stop)
        self._versions = {unit: weight_version(course, unit, step) for unit in range(piece.start, piece.stop)}
        self._has_copies = course.method.full_parameters and course.owner(node) is not None
        has_head = node == holder or self._has_copies
        self._head: int | None = weight_version(course, course.head, step) if has_head else None
        self._embedding = weight_version(course, EMBEDDING, step) if has_head or not course.invertible else 0
        helped = (unit for one in plan.placement.helped_by(node) for unit in range(one.start, one.stop))
        self._helped = {unit: weight_version(course, unit, step) for unit in helped}
        self._went_back: set[tuple[int, int, int]] = set()
        self._fits: set[tuple[int, int, int]] = set()
        self._forwarded: set[tuple[int, int]] = set()
        self._backwards: dict[int, int] = {}
        self._embedding_backwards: dict[int, int] = {}

    def hand_over(self, action: Action) -> None:
        """Note a hand-over: a received head has had all updates before its turn.

        A sent head changes nothing here.
        """
        if action.op is Op.RECEIVE:
            course, step = self._first_steps[action.start]
            self._head = weight_version(course, course.head, step)
            self._embedding = weight_version(course, EMBEDDING, step)

    def problem(self, plan: Plan, item: Item, action: Action) -> str:
        """What is wrong with an action of ``item``; empty if nothing is.

        In ``plan`` the decisions that hold for the item's turn are settled.
        """
        op, course = action.op, plan.course
        if op is Op.EMBED:
            return self._of_embedding(course, item, "sees")
        if op is Op.HEAD:
            return self._of_head(course, item, "sees") or self._of_embedding(course, item, "is tied to")
        if op is Op.UPDATE:
            return self._update(plan, item, action)
        if op is Op.SAVE:
            saved = Action(Op.FORWARD_FREE, item.seq, -1, *self._hosted)
            if self._has_copies and (why := self._of_embedding(course, item, "saves")):
                return why
            return self._stale(course, item, saved) or (
                self._of_head(course, item, "saves") if self._node == item.owner or self._has_copies else ""
            )
        if op.graph is Graph.FREES:
            return self._backward(course, item, action)
        if op in (Op.SHIP, Op.FIT):
            return self._pairs(course, item, action)
        if op.scope is Scope.RANGE and op.is_forward and op is not Op.SKIP and not op.is_of_cache:
            self._forwarded.add((action.seq, action.micro))
            return self._stale(course, item, action)
        return ""

    def _of_head(self, course: Course, item: Item, does: str) -> str:
        wanted = weight_version(course, course.head, item.step)
        return (
            "" if self._head == wanted else f"{does} a head of version {self._head} at step {item.step}, not {wanted}"
        )

    def _of_embedding(self, course: Course, item: Item, does: str) -> str:
        wanted = weight_version(course, EMBEDDING, item.step)
        found = self._embedding
        return "" if found == wanted else f"{does} an embedding of version {found} at step {item.step}, not {wanted}"

    def _backward(self, course: Course, item: Item, action: Action) -> str:
        if action.start == EMBEDDING:
            self._embedding_backwards[action.seq] = self._embedding_backwards.get(action.seq, 0) + 1
            return self._of_embedding(course, item, "goes backward through")
        self._backwards[action.seq] = self._backwards.get(action.seq, 0) + 1
        if (action.seq, action.micro) not in self._forwarded:
            return "backward before forward"
        units = range(action.start, action.stop)
        self._went_back |= {(action.seq, action.micro, unit) for unit in units}
        if any(self._versions.get(unit, 0) != backward_version(course, unit, item) for unit in units):
            return "backward before the update of the item before"
        return ""

    def _update(self, plan: Plan, item: Item, action: Action) -> str:
        if action.start == plan.course.head:
            why = self._of_head(plan.course, item, "updates") if self._has_copies else ""
            self._head = weight_version(plan.course, plan.course.head, item.step + 1)
            return why
        if action.start == EMBEDDING:
            why = self._of_embedding(plan.course, item, "updates")
            self._embedding += 1
            down = [leg for way in legs(plan, item, self._node) for leg in way if leg.op is Op.BACKWARD]
            missing = sum(leg.start == EMBEDDING for leg in down) - self._embedding_backwards.get(action.seq, 0)
            return why or (f"update before {missing} of its backwards" if missing else "")
        if any(one.has_block(action.start) for one in plan.placement.helped_by(self._node)):
            return self._helped_update(plan, item, action)
        for unit in range(action.start, action.stop):
            self._versions[unit] += 1
        hosted = [leg for way in legs(plan, item, self._node) for leg in way if leg.start > EMBEDDING]
        expected = sum(leg.op.graph is Graph.FREES for leg in hosted)
        missing = expected - self._backwards.get(action.seq, 0)
        return f"update before {missing} of its backwards" if missing else ""

    def _pairs(self, course: Course, item: Item, action: Action) -> str:
        """What is wrong with pairs that are packed at their host, or fitted at a helper."""
        if action.op is Op.SHIP:
            shipped = {(action.seq, action.micro, unit) for unit in range(action.start, action.stop)}
            return "" if shipped <= self._went_back else "ships pairs before their backward"
        self._fits.add((action.seq, action.micro, action.start))
        for unit in range(action.start, action.stop):
            wanted = weight_version(course, unit, item.step)
            if self._helped[unit] != wanted:
                return f"fits block {unit} of version {self._helped[unit]} at step {item.step}, not {wanted}"
        return ""

    def _helped_update(self, plan: Plan, item: Item, action: Action) -> str:
        for unit in range(action.start, action.stop):
            self._helped[unit] += 1
        expected = {
            (action.seq, micro, leg.start)
            for micro, way in enumerate(fit_legs(plan, item, self._node))
            for leg in way
            if leg.op is Op.FIT and leg.start < action.stop and action.start < leg.stop
        }
        missing = len(expected - self._fits)
        return f"update before {missing} of its fits" if missing else ""

    def _stale(self, course: Course, item: Item, action: Action) -> str:
        lowest = min(lowest_units(course, item), default=course.head)
        if action.op.graph is Graph.KEEPS and action.start < lowest:
            return f"keeps a graph below block {lowest}, the lowest that trains"
        for unit in range(action.start, action.stop):
            wanted = forward_version(course, unit, item)
            if self._versions.get(unit, 0) != wanted:
                return f"block {unit} has version {self._versions.get(unit, 0)}, step {item.step} must see {wanted}"
        return ""


def _check_versions(plan: Plan, turns: tuple[Turn, ...], table: Table, node: str, holder: str) -> None:
    by_seq = {item.seq: (item, turn.settled(plan)) for turn in turns for item in items(plan.course, turn)}
    column = _Column(plan, turns, node, holder)
    for position, action in enumerate(table[node]):
        if action.payload == Payload.HEAD:
            column.hand_over(action)
        elif action.op.scope is not Scope.MESSAGE and action.seq in by_seq:
            item, decided = by_seq[action.seq]
            why = column.problem(decided, item, action)
            if why:
                raise _refuse(plan, table, node, position, why)


def parse_table(text: str, num_blocks: int) -> dict[str, list[Action]]:
    """Read what ``format_table`` printed; the order per node is kept, idle cells are dropped."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2:
        raise PlanError("the table is empty; its first line names the nodes, its second is a rule")
    nodes = lines[0].split()
    table: dict[str, list[Action]] = {node: [] for node in nodes}
    for line in lines[2:]:
        cells = line.replace("<-- here", "").split()[1:]
        if len(cells) != len(nodes):
            raise PlanError(f"the row {line.strip()!r} has {len(cells)} cells for {len(nodes)} nodes")
        for node, cell in zip(nodes, cells, strict=True):
            if cell != ".":
                table[node].append(parse_action(cell, num_blocks))
    return table

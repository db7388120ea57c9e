"""Table of actions of each node: built from a plan, printed, and parsed.

A table has a column for each node; a row is a point in time if every action takes one unit and messages none::

         c            a            b
    ------------------------------------------
      0  E0.0         .            .
      1  >h0.0#0@a    .            .
      2  .            <h0.0#0@c    .

Precedent: the CSV schedules of torch.distributed.pipelining.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from ringtune.schedule.actions import Action, Op, Payload, format_action, message
from ringtune.schedule.lowering import Legs, fit_legs, item_updates, legs, replica_messages, weights_key
from ringtune.schedule.plan import Plan
from ringtune.schedule.stages import copy_messages
from ringtune.schedule.turns import Item, StartPoint, Turn, items
from ringtune.schedule.versions import awaits_next_backward, is_stale

Table = Mapping[str, Sequence[Action]]


# ---- building ------------------------------------------------------------------------------------


def build_table(plan: Plan, turns: Iterable[Turn], *, start: StartPoint | None = None) -> dict[str, list[Action]]:
    """Build the actions of every node for these turns.

    Items are one after another, in 1F1B order where weights are stale. Within an item a node does each stretch up to
    its next receive for all micro-batches in turn.
    """
    table: dict[str, list[Action]] = {node: [] for node in plan.nodes}
    holder = start.holder if start else ""
    for turn in turns:
        if holder not in ("", turn.owner) and not plan.course.method.full_parameters:
            table[holder].append(_hand_over(Op.SEND, turn, turn.owner))
            table[turn.owner].append(_hand_over(Op.RECEIVE, turn, holder))
        now = turn.settled(plan)
        for node in plan.nodes:
            parts = [part for item in items(plan.course, turn) for part in _item_parts(now, item, node)]
            for _, actions in sorted(parts, key=lambda part: part[0]):
                table[node].extend(actions)
        holder = turn.owner
    return table


def _hand_over(op: Op, turn: Turn, peer: str) -> Action:
    return Action(op, 0, -1, turn.index, 0, peer, Payload.HEAD)


def _item_parts(plan: Plan, item: Item, node: str) -> list[tuple[tuple[int, int], list[Action]]]:
    """Return a node's actions of an item in parts, each with its place in the turn's order; a part stays together."""
    stretches: dict[tuple[int, int], list[Action]] = {}
    for micro, way in enumerate(legs(plan, item, node)):
        for key, stretch in _stretches(way):
            stretches.setdefault(key, []).extend(leg.bind(item.seq, micro) for leg in stretch)
    for micro, way in enumerate(fit_legs(plan, item, node)):
        for receive, fit in zip(way[::2], way[1::2], strict=True):
            stretches.setdefault((2, -fit.start), []).extend(leg.bind(item.seq, micro) for leg in (receive, fit))
    parts = []
    for _, actions in sorted(stretches.items()):
        first = next((action for action in actions if action.op in _PLACED), actions[0])
        parts.append((_place(plan, item, first.op, first.start), actions))
    updates = item_updates(plan, item, node)
    with_messages = [_with_messages(plan, item, node, update) for update in updates]
    # hosts that help each other send first
    with_messages.sort(key=lambda actions: actions[0].payload == Payload.WEIGHTS)
    return parts + [(_place_of_update(plan, item, node, actions), actions) for actions in with_messages]


def _place_of_update(plan: Plan, item: Item, node: str, actions: list[Action]) -> tuple[int, int]:
    """Return the place of an update; a host that does not wait for its helper updates after the next item."""
    start = actions[0].start
    piece = plan.slice_of(node)
    if piece.start <= start < piece.stop and awaits_next_backward(plan.course, start, item):
        return (item.seq + 1, 1)
    return _place(plan, item, Op.UPDATE, start)


def _with_messages(plan: Plan, item: Item, node: str, update: Action) -> list[Action]:
    """Return an update with its messages: of copies, of replicas, and of weights between helper and host."""
    if update.op is not Op.UPDATE:
        return [update]
    key = weights_key(update)
    for helper in plan.placement.helpers:
        if helper.has_block(update.start):
            if helper.node == node:
                return [update, message(Op.SEND, key, plan.placement.host_of(helper.start))]
            return [message(Op.RECEIVE, key, helper.node), update]
    messages = copy_messages(plan.course, item, node, update.start) or replica_messages(plan, node, update)
    return [*messages, update]


_PLACED = (Op.FORWARD, Op.HEAD, Op.BACKWARD)


def _stretches(way: Legs) -> Iterable[tuple[tuple[int, int], Legs]]:
    """Cut a way at its receives; each stretch has a key that orders them from the bottom up and down again."""
    starts = [at for at, leg in enumerate(way) if leg.op is Op.RECEIVE or at == 0]
    for at, end in itertools.pairwise([*starts, len(way)]):
        first = way[at]
        is_backward = first.payload == Payload.GRAD or first.op is Op.BACKWARD
        yield (1, -first.start) if is_backward else (0, first.start), way[at:end]


def _place(plan: Plan, item: Item, op: Op, unit: int) -> tuple[int, int]:
    """Return the place of an item's action in its turn: item after item, or 1F1B where weights are stale.

    With equal actions host p of P does the forward of item k at 2k + p and the backward at 2k + 2P - 1 - p; the head is
    between those of the top host. In halves of that unit, embeddings first::

        E 4k - 3    F 4k + 2p    H 4k + 2P - 1    B 4k + 4P - 2 - 2p    U one later
    """
    course = plan.course
    if not item.kind.has_update or not is_stale(course):
        return (item.seq, 0)
    turn, k = divmod(item.step, course.local_iterations)
    num_hosts, above = len(plan.placement.hosts), plan.placement.hosts_above(unit)
    if op is Op.EMBED:
        return (turn, 4 * k - 3)
    if unit == course.head:
        return (turn, 4 * k + 2 * num_hosts - 1)
    if op is Op.FORWARD:
        return (turn, 4 * k + 2 * (num_hosts - above))
    return (turn, 4 * k + 2 * num_hosts - 2 + 2 * above + (1 if op is Op.UPDATE else 0))


# ---- printing and parsing whole tables --------------------------------------------------------------


def format_table(table: Table, num_blocks: int) -> str:
    """Print a table, a column per node."""
    rows, _ = replay(table)
    nodes = list(table)
    cells = [
        [format_action(table[node][row[node]], num_blocks) if node in row else "." for node in nodes] for row in rows
    ]
    widths = [max([len(node), *(len(row[i]) for row in cells)]) for i, node in enumerate(nodes)]
    number = max(3, len(str(len(rows))))
    header = " " * number + "  " + "  ".join(node.ljust(width) for node, width in zip(nodes, widths, strict=True))
    lines = [header.rstrip(), "-" * len(header)]
    for index, row in enumerate(cells):
        body = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"{index:>{number}}  {body}".rstrip())
    return "\n".join(lines) + "\n"


def message_of(node: str, action: Action) -> tuple[str, str, str, int, int, int]:
    """Return the identity of a message: payload, sender, receiver, seq, micro, boundary."""
    ends = (node, action.peer) if action.op is Op.SEND else (action.peer, node)
    return (action.payload, *ends, action.seq, action.micro, action.start)


def replay(table: Table) -> tuple[list[dict[str, int]], dict[str, int]]:
    """Run all nodes side by side; return rows of {node: position}, and the position where each node got stuck.

    Actions after that are appended one cell a row, so that a printed table is complete.
    """
    at = dict.fromkeys(table, 0)
    sent: set[tuple[str, str, str, int, int, int]] = set()
    rows: list[dict[str, int]] = []
    while True:
        row: dict[str, int] = {}
        for node, actions in table.items():
            if at[node] < len(actions):
                action = actions[at[node]]
                if action.op is not Op.RECEIVE or message_of(node, action) in sent:
                    row[node] = at[node]
        if not row:
            break
        for node, position in row.items():
            at[node] += 1
            if table[node][position].op is Op.SEND:
                sent.add(message_of(node, table[node][position]))
        rows.append(row)
    stuck = {node: position for node, position in at.items() if position < len(table[node])}
    rest = max((len(table[node]) - position for node, position in stuck.items()), default=0)
    rows += [{n: p + offset for n, p in stuck.items() if p + offset < len(table[n])} for offset in range(rest)]
    return rows, stuck

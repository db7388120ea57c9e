"""The table of actions per node: built from a plan, printed, parsed back, and validated.

One action is one word::

    E12.0        embed micro-batch 0 of item 12       f12.0[0,1)   forward of block 0 without graph
    F12.0[3,4)   forward with graph                   B12.0[3,4)   backward
    H12.0        head and loss                        U12[3,4)     update of blocks, U12[head] of the head
    K12          save what this node trained
    >h12.0#2@b   send the hidden state that enters block 2 to node b       <h12.0#2@a   receive it
    >g12.0#4@b   send the gradient of that hidden state                    >t3@b  <t3@a  hand the head over

A table has a column per node; a row is a point in time if every action takes one unit and messages none::

         c            a            b
    ------------------------------------------
      0  E0.0         .            .
      1  >h0.0#0@a    .            .
      2  .            <h0.0#0@c    .

Precedent: the CSV schedules of torch.distributed.pipelining and their validator.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ringtune.errors import PlanError
from ringtune.schedule.lowering import (
    Action,
    Leg,
    Op,
    Payload,
    forward_version,
    hosts_above,
    item_legs,
    item_updates,
    lowest_with_graph,
    num_microbatches,
    weight_version,
)
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import Item, StartPoint, Turn, items

Table = Mapping[str, Sequence[Action]]

_PLACED = (Op.FORWARD, Op.HEAD, Op.BACKWARD)

_NODE = r"[a-z0-9][a-z0-9._-]*"
_PATTERNS = (
    re.compile(r"(?P<op>K)(?P<seq>\d+)"),
    re.compile(r"(?P<op>[EH])(?P<seq>\d+)\.(?P<micro>\d+)"),
    re.compile(r"(?P<op>[fFSBC])(?P<seq>\d+)\.(?P<micro>\d+)\[(?P<start>\d+),(?P<stop>\d+)\)"),
    re.compile(r"(?P<op>U)(?P<seq>\d+)\[(?:(?P<start>\d+),(?P<stop>\d+)\)|(?P<head>head)\])"),
    re.compile(rf"(?P<op>[<>])(?P<payload>[hg])(?P<seq>\d+)\.(?P<micro>\d+)#(?P<start>\d+)@(?P<peer>{_NODE})"),
    re.compile(rf"(?P<op>[<>])(?P<payload>t)(?P<start>\d+)@(?P<peer>{_NODE})"),
)


def format_action(action: Action, num_blocks: int) -> str:
    """Print one action; ``num_blocks`` tells the head's update from a block's."""
    op, seq, micro, start, stop, peer, payload = action
    if op in (Op.SEND, Op.RECEIVE):
        return f"{op}t{start}@{peer}" if payload == Payload.HEAD else f"{op}{payload}{seq}.{micro}#{start}@{peer}"
    if op is Op.SAVE:
        return f"{op}{seq}"
    if op is Op.UPDATE:
        return f"U{seq}[head]" if start == num_blocks else f"U{seq}[{start},{stop})"
    if op in (Op.EMBED, Op.HEAD):
        return f"{op}{seq}.{micro}"
    return f"{op}{seq}.{micro}[{start},{stop})"


def parse_action(text: str, num_blocks: int) -> Action:
    """Read what ``format_action`` printed.

    Raises:
        PlanError: the word is not an action.
    """
    for pattern in _PATTERNS:
        match = pattern.fullmatch(text)
        if match:
            part = match.groupdict()
            head = part.get("head") is not None
            return Action(
                op=Op(part["op"]),
                seq=int(part.get("seq") or 0),
                micro=int(part["micro"]) if part.get("micro") else -1,
                start=num_blocks if head else int(part.get("start") or 0),
                stop=num_blocks if head else int(part.get("stop") or 0),
                peer=part.get("peer") or "",
                payload=part.get("payload") or "",
            )
    raise PlanError(f"{text!r} is not an action; one looks like f12.0[0,1) or >h12.0#2@node-1")


def build_table(plan: Plan, turns: Iterable[Turn], *, start: StartPoint | None = None) -> dict[str, list[Action]]:
    """The actions of every node for these turns, item after item (nothing runs ahead); for PipeAdapter 1F1B.

    Within an item a node takes each stretch up to its next receive for all micro-batches in turn.
    """
    table: dict[str, list[Action]] = {node: [] for node in plan.nodes}
    holder = start.holder if start else ""
    for turn in turns:
        if holder not in ("", turn.owner):
            table[holder].append(_hand_over(Op.SEND, turn, turn.owner))
            table[turn.owner].append(_hand_over(Op.RECEIVE, turn, holder))
        now = plan.unfrozen_at(turn.unfreeze_at)
        for node in plan.nodes:
            parts = [part for item in items(plan, turn) for part in _item_parts(now, item, node)]
            for _, actions in sorted(parts, key=lambda part: part[0]):
                table[node].extend(actions)
        holder = turn.owner
    return table


def _hand_over(op: Op, turn: Turn, peer: str) -> Action:
    return Action(op, 0, -1, turn.index, 0, peer, Payload.HEAD)


def _item_parts(plan: Plan, item: Item, node: str) -> list[tuple[tuple[int, int], list[Action]]]:
    """What a node does for an item, in parts that stay together, each with its place in the order of the turn."""
    micros = range(num_microbatches(plan, item))
    parts = []
    for stretch in _stretches(item_legs(plan, item, node)):
        actions = [leg.bind(item.seq, micro) for micro in micros for leg in stretch]
        first = next((leg for leg in stretch if leg.op in _PLACED), stretch[0])
        parts.append((_place(plan, item, first.op, first.start), actions))
    updates = item_updates(plan, item, node)
    return parts + [(_place(plan, item, update.op, update.start), [update]) for update in updates]


def _place(plan: Plan, item: Item, op: Op, block: int) -> tuple[int, int]:
    """Where an action of an item comes in the order of its turn: item after item, or for PipeAdapter 1F1B.

    With equal actions host p of P does the forward of item k at 2k + p and the backward at 2k + 2P - 1 - p; the
    head comes between those of the top host. In halves of that unit, embeddings first::

        E 4k - 3    F 4k + 2p    H 4k + 2P - 1    B 4k + 4P - 2 - 2p    U one later
    """
    if plan.method != "pipeadapter" or not item.kind.has_update:
        return (item.seq, 0)
    turn, k = divmod(item.step, plan.local_iterations)
    num_hosts, above = hosts_above(plan, plan.private_blocks), hosts_above(plan, block)
    if op is Op.EMBED:
        return (turn, 4 * k - 3)
    if block == plan.num_blocks or op is Op.HEAD:
        return (turn, 4 * k + 2 * num_hosts - 1)
    if op is Op.FORWARD:
        return (turn, 4 * k + 2 * (num_hosts - above))
    return (turn, 4 * k + 2 * num_hosts - 2 + 2 * above + (1 if op is Op.UPDATE else 0))


def _stretches(legs: tuple[Leg, ...]) -> list[list[Leg]]:
    stretches: list[list[Leg]] = []
    for leg in legs:
        if leg.op is Op.RECEIVE or not stretches:
            stretches.append([])
        stretches[-1].append(leg)
    return stretches


# ---- printing and parsing ------------------------------------------------------------------------


def format_table(table: Table, num_blocks: int, *, marked: tuple[str, int] | None = None) -> str:
    """Print a table, a column per node.

    Args:
        table: actions per node, in their order.
        num_blocks: blocks of the model.
        marked: (node, position) of a bad cell, shown with ``<-- here``.
    """
    rows, _ = _replay(table)
    nodes = list(table)
    cells = [[_cell(table, node, row.get(node), num_blocks, marked) for node in nodes] for row in rows]
    widths = [max([len(node), *(len(row[i]) for row in cells)]) for i, node in enumerate(nodes)]
    number = max(3, len(str(len(rows))))
    header = " " * number + "  " + "  ".join(node.ljust(width) for node, width in zip(nodes, widths, strict=True))
    lines = [header.rstrip(), "-" * len(header)]
    for index, row in enumerate(cells):
        body = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"{index:>{number}}  {body}".rstrip())
    return "\n".join(lines) + "\n"


def _cell(table: Table, node: str, position: int | None, num_blocks: int, marked: tuple[str, int] | None) -> str:
    if position is None:
        return "."
    text = format_action(table[node][position], num_blocks)
    return f"{text} <-- here" if marked == (node, position) else text


def parse_table(text: str, num_blocks: int) -> dict[str, list[Action]]:
    """Read what ``format_table`` printed; the order per node is kept, idle cells are dropped.

    Raises:
        PlanError: a row has another number of cells than there are nodes, or a cell is not an action.
    """
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


def _message(node: str, action: Action) -> tuple[str, str, str, int, int, int]:
    """What identifies a message: payload, sender, receiver, seq, micro, boundary."""
    ends = (node, action.peer) if action.op is Op.SEND else (action.peer, node)
    return (action.payload, *ends, action.seq, action.micro, action.start)


def _replay(table: Table) -> tuple[list[dict[str, int]], dict[str, int]]:
    """Run all nodes side by side: rows of {node: position}, and where each node got stuck.

    What can never run is appended one cell a row, so that nothing is left out of a printed table.
    """
    at = dict.fromkeys(table, 0)
    sent: set[tuple[str, str, str, int, int, int]] = set()
    rows: list[dict[str, int]] = []
    while True:
        row: dict[str, int] = {}
        for node, actions in table.items():
            if at[node] < len(actions):
                action = actions[at[node]]
                if action.op is not Op.RECEIVE or _message(node, action) in sent:
                    row[node] = at[node]
        if not row:
            break
        for node, position in row.items():
            at[node] += 1
            if table[node][position].op is Op.SEND:
                sent.add(_message(node, table[node][position]))
        rows.append(row)
    stuck = {node: position for node, position in at.items() if position < len(table[node])}
    rest = max((len(table[node]) - position for node, position in stuck.items()), default=0)
    rows += [{n: p + offset for n, p in stuck.items() if p + offset < len(table[n])} for offset in range(rest)]
    return rows, stuck


# ---- validation ----------------------------------------------------------------------------------


def validate_table(plan: Plan, turns: Iterable[Turn], table: Table, *, start: StartPoint | None = None) -> None:
    """Check that a table carries these turns out correctly, in whatever order it runs ahead.

    Every node has exactly the actions of the lowering; each receive has its send; nothing deadlocks; every
    forward sees its ``forward_version``, every head all updates; a backward follows its forward and the update of the
    item before, an update its backwards.

    Raises:
        PlanError: with the whole table and the bad cell marked.
    """
    granted = tuple(turns)
    by_seq = {item.seq: (item, plan.unfrozen_at(turn.unfreeze_at)) for turn in granted for item in items(plan, turn)}
    expected = build_table(plan, granted, start=start)
    for node, actions in table.items():
        _check_actions(plan, table, node, actions, expected.get(node, []))
    _check_messages(plan, table)
    for node in table:
        _check_versions(plan, granted, by_seq, table, node, start.holder if start else granted[0].owner)


def _refuse(plan: Plan, table: Table, node: str, position: int, why: str) -> PlanError:
    text = format_table(table, plan.num_blocks, marked=(node, position))
    return PlanError(f"node {node}: {why}\n{text}")


def _check_actions(plan: Plan, table: Table, node: str, actions: Sequence[Action], expected: Sequence[Action]) -> None:
    wanted = set(expected)
    seen: set[Action] = set()
    for position, action in enumerate(actions):
        if action not in wanted or action in seen:
            word = format_action(action, plan.num_blocks)
            raise _refuse(plan, table, node, position, f"{word} {'twice' if action in seen else 'is not in the plan'}")
        seen.add(action)
    missing = [action for action in expected if action not in seen]
    if missing:
        word = format_action(missing[0], plan.num_blocks)
        raise _refuse(plan, table, node, len(actions) - 1, f"{word} is missing")


def _check_messages(plan: Plan, table: Table) -> None:
    sent = {_message(node, action) for node in table for action in table[node] if action.op is Op.SEND}
    for node, actions in table.items():
        for position, action in enumerate(actions):
            if action.op is Op.RECEIVE and _message(node, action) not in sent:
                raise _refuse(plan, table, node, position, "this receive has no send")
    _, stuck = _replay(table)
    if stuck:
        node, position = next(iter(stuck.items()))
        raise _refuse(plan, table, node, position, "deadlock: this action never becomes possible")


def _check_versions(
    plan: Plan, turns: tuple[Turn, ...], by_seq: Mapping[int, tuple[Item, Plan]], table: Table, node: str, holder: str
) -> None:
    """Walk one node's column with the number of updates that each of its units has had.

    ``by_seq`` has each item with the plan as it is for its turn.
    """
    piece = plan.slice_of(node)
    plan = plan.unfrozen_at(turns[0].unfreeze_at)
    versions = {block: weight_version(plan, block, turns[0].first_step) for block in range(piece.start, piece.stop)}
    head: int | None = turns[0].first_step if node == holder else None
    first_steps = {turn.index: turn.first_step for turn in turns}
    forwarded: set[tuple[int, int]] = set()
    backwards: dict[int, int] = {}
    for position, action in enumerate(table[node]):
        item, plan = by_seq.get(action.seq, (None, plan))
        why = ""
        if action.payload == Payload.HEAD:
            head = first_steps[action.start] if action.op is Op.RECEIVE else head
        elif item is None or action.op in (Op.SEND, Op.RECEIVE, Op.EMBED):
            continue
        elif action.op in (Op.FORWARD, Op.FORWARD_FREE):
            why = _stale(plan, versions, item, action)
            forwarded.add((action.seq, action.micro))
        elif action.op is Op.HEAD and head != item.step:
            why = f"the head has version {head}, step {item.step} must see {item.step}"
        elif action.op is Op.BACKWARD:
            why = "" if (action.seq, action.micro) in forwarded else "backward before forward"
            if versions[action.start] != weight_version(plan, action.start, item.step):
                why = why or "backward before the update of the item before"
            backwards[action.seq] = backwards.get(action.seq, 0) + 1
        elif action.op is Op.UPDATE and action.start == plan.num_blocks:
            head = item.step + 1
        elif action.op is Op.UPDATE:
            missing = num_microbatches(plan, item) - backwards.get(action.seq, 0)
            why = f"update before {missing} of its backwards" if missing else ""
            for block in range(action.start, action.stop):
                versions[block] += 1
        elif action.op is Op.SAVE:
            why = _stale(plan, versions, item, Action(Op.FORWARD_FREE, item.seq, -1, piece.start, piece.stop))
            if not why and node == item.owner and head != item.step:
                why = f"saves a head of version {head} at step {item.step}"
        if why:
            raise _refuse(plan, table, node, position, why)


def _stale(plan: Plan, versions: Mapping[int, int], item: Item, action: Action) -> str:
    lowest = lowest_with_graph(plan, item.kind, item.step)
    if action.op is Op.FORWARD and action.start < lowest:
        return f"keeps a graph below block {lowest}, the lowest trainable one"
    for block in range(action.start, action.stop):
        wanted = forward_version(plan, block, item)
        if versions.get(block, 0) != wanted:
            return f"block {block} has version {versions.get(block, 0)}, step {item.step} must see {wanted}"
    return ""

"""Tables of actions as text, read back."""

from __future__ import annotations

from ringtune.errors import PlanError
from ringtune.schedule.actions import Action, parse_action


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

"""What a prefix cache would save a run: the coordinator's own decisions, as if every turn were done at once."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from ringtune.rounds.turns.turn_prefixes import TurnPrefixes
from ringtune.schedule.changing_hands.placements import due
from ringtune.schedule.plan import Plan
from ringtune.schedule.prefixes.kept import hosts_at
from ringtune.schedule.turns.turns import ITEMS_AHEAD, StartPoint, Turn, items, turn_sequence

MOST_ITEMS: Final = 100_000
"""About so many items from the beginning are looked at, which takes seconds; of a longer run these stand for all."""


@dataclass(slots=True)
class ExpectedPrefixes:
    """What of a run enters above the embedding.

    Attributes:
        items: passes of batches through the ring.
        entering: of these, those that enter where they were kept.
        blocks: forwards of blocks that these spare, of one batch through one block each.
        kept: host -> batches that it keeps, counted as often as they are kept anew.
    """

    items: int = 0
    entering: int = 0
    blocks: int = 0
    kept: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def expect_prefixes(plan: Plan, *, start: StartPoint | None = None) -> ExpectedPrefixes:
    """Decide the turns of a run from its beginning, up to ``MOST_ITEMS``, and count.

    Where the losses of the run decide what trains, nothing more trains in this expectation.
    """
    found, part = ExpectedPrefixes(), plan.at(plan.placement.placement_number)
    prefixes = TurnPrefixes(part, items_ahead=ITEMS_AHEAD)
    under_way: list[Turn] = []
    for turn in itertools.takewhile(lambda turn: turn.first_seq < MOST_ITEMS, turn_sequence(plan.course, start=start)):
        if (placement_number := due(plan.course, plan.placements, turn)) != part.placement.placement_number:
            part, under_way = plan.at(placement_number), []
            prefixes = prefixes.moved(part)
        while under_way and not prefixes.may_grant(turn):
            prefixes.close(under_way.pop(0))
        decided = prefixes.decided(turn)
        prefixes.granted(decided)
        under_way.append(decided)
        found.items += turn.num_items
        for item in items(plan.course, decided) if decided.passages else ():
            found.entering += bool(item.passage.enters)
            found.blocks += item.passage.enters
            if item.passage.keeps:
                for host in hosts_at(part.placement, item.passage.keeps):
                    found.kept[host] += 1
    return found

"""A change counts beyond the noise of a run and beside turns of the same work only: runs of equal boards.

``python -m tests.bench.alarms`` has a hundred runs of links too; a quarter of them shows a rule that has become worse.
"""

from __future__ import annotations

from ringtune.costs.calibration import (
    CHANGED,
    LASTING_TURNS,
    MAX_USUAL_TURNS,
    ChangeDetector,
)
from tests.bench.alarms import LONG, NEIGHBOURS, RUNS, board_alarms, link_alarms, other_links, slow_boards, slow_links

LINK_RUNS = 25


def test_equal_boards_with_noise_and_more_that_trains_are_no_alarm() -> None:
    """Of a hundred runs with quotas, drift, and bursts at most two look for another placement."""
    assert sum(bool(board_alarms(seed)) for seed in range(RUNS)) <= 2


def test_equal_links_with_the_noise_of_radio_are_seldom_an_alarm() -> None:
    """At most one in twenty."""
    assert sum(bool(link_alarms(seed)) for seed in range(LINK_RUNS)) <= 1


def test_what_lasts_is_found_within_some_turns() -> None:
    """A board at half its speed: nearly always, after three to seven turns."""
    found = slow_boards()
    assert sum(LASTING_TURNS - 1 <= after <= 7 for after in found.turns) >= 0.97 * RUNS
    assert found.others <= 3


def test_a_link_at_a_fifth_of_its_rate_is_found_within_some_turns() -> None:
    """Between neighbours always, after three to seven turns; no board and hardly any other link is named."""
    found = slow_links(NEIGHBOURS, runs=LINK_RUNS)
    assert len(found.turns) == LINK_RUNS and min(found.turns) >= LASTING_TURNS and max(found.turns) <= 7
    assert found.others <= 1


def test_a_link_that_few_turns_use_is_found_after_three_of_them() -> None:
    """One of an initiator, which is that of every fourth turn: after 9 to 12 turns of a long run."""
    found = slow_links(other_links(), plan=LONG, since=(24, 40), runs=4)
    assert len(found.turns) == 4 and min(found.turns) > 4 * (LASTING_TURNS - 1)
    assert max(found.turns) <= 4 * LASTING_TURNS


def test_usual_are_the_first_turns_of_a_kind() -> None:
    """One that becomes slower by a hundredth each turn is found, as later turns do not become the usual ones."""
    watch = ChangeDetector[str](CHANGED)
    since = []
    for turn in range(60):
        watch.add("a", 0, {"w": (1.01**turn, 1.0), "new": (5.0, 0.0)})
        since += [turn] if watch.changed() else []
    first = since[0]
    assert (
        since == list(range(first, 60)) and CHANGED <= 1.01 ** (first - LASTING_TURNS + 1) / 1.01**4 <= 1.02 * CHANGED
    )
    assert MAX_USUAL_TURNS == 6

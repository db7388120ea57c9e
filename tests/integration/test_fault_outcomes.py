"""Faults of links, disks, memory and clocks on boards: a sample of the rows that ``make faults`` carries out.

Skipped, with the reason, where the machine can't: without root, network namespaces, shaping or control groups.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from deploy.testbed.capabilities import find_capabilities
from tests.bench.outcomes import ROWS, STRIKE_AT
from tests.support.outcomes import STRIKES, Matrix, Row, board_matrix

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(900)]

STRUCK = (
    "link down",
    "unheard by the coordinator",
    "link of 0.2 Mbit/s",
    "disk full",
    "disk read-only",
    "out of memory",
)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    """A ring on boards; skips if the machine has not what they need."""
    here = find_capabilities()
    if here.missing:
        pytest.skip(f"no boards are possible here: {'; '.join(here.missing)}")
    with board_matrix(tmp_path_factory.mktemp("boards"), f"rto{os.getpid()}", capabilities=here) as made:
        yield made


@pytest.mark.promise("6 every wait ends")
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.victim == "c" and row.strike in STRUCK], ids=lambda row: row.title
)
def test_fault_comes_out_as_it_is_stated(matrix: Matrix, row: Row) -> None:
    """Weights, books, times and what is said are those of the row."""
    if why := STRIKES[row.strike].lacks():
        pytest.skip(why)
    assert matrix.carry_out(row, strike_at=STRIKE_AT).problems == ()

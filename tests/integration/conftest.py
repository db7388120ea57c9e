"""A ring for all tests of this folder that a process runs: agents live through many runs, as on real devices."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.planner.limits import Effort
from coordinator.run import planning
from tests.support import tiny
from tests.support.cluster import RUN_LEASE_S, Cluster, running


@pytest.fixture(scope="session")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Owners a and b, and the host c, which has no data; none is left in the end.

    Between runs, too, nobody's lease ends because the machine is busy: a run that waits for half a second takes all.
    """
    folder = tmp_path_factory.mktemp("ring")
    with running(folder, owners=["a", "b"], hosts=["c"], lease_s=RUN_LEASE_S) as made:
        yield made


@pytest.fixture(autouse=True)
def ring_is_whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start the nodes of the ring again that a test has ended."""
    ring = request.getfixturevalue("ring") if "ring" in request.fixturenames else None
    yield
    if isinstance(ring, Cluster):
        ring.revive()


@pytest.fixture(scope="session")
def minilm_shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights in the shape of all-MiniLM-L6-v2: 91 MB, of which two blocks are 14 MB."""
    return tiny.write_bert(
        tmp_path_factory.mktemp("minilm") / "model",
        vocab_size=30522,
        hidden_size=384,
        num_blocks=6,
        num_heads=12,
        intermediate_size=1536,
    )


@pytest.fixture(scope="module", autouse=True)
def short_judging() -> Iterator[None]:
    """Let the simulator judge rings by an eighth of the actions: a run's result is the same on any ring."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "Effort", functools.partial(Effort, judged_actions=8000))
        yield

"""A cluster for the tests of one module: agents live through several runs, as on real devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import tiny
from tests.support.cluster import AGENTS, Cluster, running

GRACE_S = 5.0


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process behind which belongs to no cluster; a test may start agents again."""
    before = _strangers()
    yield
    _, alive = psutil.wait_procs(_strangers() - before, timeout=GRACE_S)
    for child in alive:
        child.kill()
    assert not alive, f"left behind: {alive}"


def _strangers() -> set[psutil.Process]:
    own = {process.pid for process in AGENTS}
    return {child for child in psutil.Process().children() if child.pid not in own}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes on loopback, two of them owners; none is left in the end."""
    with running(tmp_path_factory.mktemp("ring"), owners=["node-0", "node-1"], hosts=["node-2"]) as made:
        yield made
    assert not AGENTS


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

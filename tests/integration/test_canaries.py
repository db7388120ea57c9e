"""Canaries in samples and labels: no wire, log or folder of anybody else ever has them, also where a run fails.

Names of classes travel, once for each owner and plan, as every node has to give them the same numbers; which row is of
which class does not.
"""

from __future__ import annotations

import csv
import itertools
import json
import logging
import random
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from coordinator.client.saved_run import read_run_file
from coordinator.server.run_store import RunStore
from edge.data.dataset import OwnerDataset
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import items, turn_sequence
from tests.support import tiny
from tests.support.cluster import TEMPLATE, Cluster, _plan_part
from tests.support.failpoints import order_failure
from tests.support.tap import Tap
from tests.support.typed import run_here

pytestmark = pytest.mark.slow

CLASSES = ("canaryclassone", "canaryclasstwo")
ROW = re.compile(rb"canary\d{4}row")
_NAMES = "|".join(CLASSES)
LABELS = re.compile(rf"(?:{_NAMES})(?:[^A-Za-z]{{1,8}}(?:{_NAMES})){{3}}".encode())
"""The classes of several rows, one after the other."""
BAD_ROW = "canary9999row"
ROWS = 60
RING = (("node-0", 0, 1), ("node-2", 1, 3), ("node-1", 3, 4))
LEASE_S = 60.0
"""Longer than a busy machine lets a node wait: nobody is to be lost here."""


WIDTHS = {"b": 1, "<h": 2, ">h": 2, "<i": 4, ">i": 4, "<q": 8, ">q": 8, "<f": 4, "<d": 8}
IDS_IN_A_ROW = 6
MIN_CHANGES = 4


def encodings(numbers: Sequence[int]) -> Iterator[tuple[str, bytes]]:
    """The numbers one after the other in every width, byte order and as protobuf varints."""
    for code in WIDTHS:
        order, kind = (code[0], code[1]) if len(code) == 2 else ("<", "B")
        yield code, struct.pack(f"{order}{len(numbers)}{kind}", *numbers)
    yield "varint", b"".join(varint(number) for number in numbers)


def varint(number: int) -> bytes:
    """One protobuf varint."""
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def find_numbers(haystack: bytes, rows: Sequence[Sequence[int]]) -> list[str]:
    """Which rows of numbers are somewhere in the bytes, in any encoding."""
    return [f"{row} as {name}" for row in rows for name, needle in encodings(row) if needle in haystack]


def numbers_of(cluster: Cluster, plan: Plan) -> list[list[int]]:
    """The labels of every batch of a run, in the order of its rows, and the first token ids of each row.

    Batches whose labels change less than four times are left out: an attention mask may look like them.
    """
    course = plan.course
    labels: set[tuple[int, ...]] = set()
    ids: set[tuple[int, ...]] = set()
    for share, owner in enumerate(cluster.owners):
        data = OwnerDataset.load(
            cluster.job(), cluster.train, cluster.eval, share=share, num_owners=2, tokenizer_folder=cluster.model
        )
        data.set_labels(course.labels)
        for turn in turn_sequence(course):
            for batch in (data.batch(course, item) for item in items(course, turn) if turn.owner == owner):
                labels.add(tuple(batch.labels.tolist()))
                ids.update(tuple(row[:IDS_IN_A_ROW]) for row in batch.ids.tolist() if all(row[:IDS_IN_A_ROW]))
    targets = [row for row in sorted(labels) if sum(a != b for a, b in itertools.pairwise(row)) >= MIN_CHANGES]
    assert len(targets) > 3 and len(ids) > 50
    return [list(row) for row in (*targets, *sorted(ids))]


class Watched(Cluster):
    """A cluster whose nodes and users reach each other through taps."""

    front: Tap | None = None
    taps: tuple[Tap, ...] = ()

    @property
    def address(self) -> str:
        """Where the tap before the coordinator listens."""
        if self.front is None:
            self.front = Tap(int(self._server.address.rpartition(":")[2]))
        return f"127.0.0.1:{self.front.port}"

    def traffic(self, *, of_ring: bool) -> bytes:
        """Everything that went over links of the ring, or over all other connections."""
        assert self.front is not None
        flows = [flow for tap in (self.front, *self.taps) for flow in list(tap.flows) if flow.is_ring == of_ring]
        return b"".join(bytes(flow.sent) + bytes(flow.received) for flow in flows)


def write(path: Path, first: int, num_rows: int) -> None:
    """Write rows that each have a canary of their own, and a class whose name is one."""
    rng = random.Random(first)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for number in range(first, first + num_rows):
            words = [rng.choice(tiny.words()) for _ in range(rng.randint(3, 12))]
            writer.writerow([" ".join([f"canary{number:04d}row", *words]), rng.choice(CLASSES)])


@contextmanager
def watched(folder: Path) -> Iterator[Watched]:
    """Two owners and a host with copies, checkpoints and a coordinator that keeps runs."""
    orders = folder / "failpoints"
    orders.mkdir()
    cluster = Watched(folder, owners=["node-0", "node-1"], hosts=["node-2"], failpoints=orders, lease_s=LEASE_S)
    write(cluster.train, 0, ROWS)
    write(cluster.eval, ROWS, 22)
    taps = {name: Tap(cluster.ports[name]) for name in cluster.names}
    cluster.taps = tuple(taps.values())
    cluster.advertised = {name: tap.port for name, tap in taps.items()}
    kept = RunStore(folder / "kept")
    cluster.coordinator.kept = kept
    with closing(kept), cluster.listening():
        yield cluster
    assert cluster.front is not None
    for tap in (cluster.front, *cluster.taps):
        tap.close()


def train(cluster: Watched, name: str, **changes: object) -> tuple[Path, str]:
    """Train as a user who logs all there is; return the folder and what was printed."""
    wanted = {
        "train__checkpoint_every": 4,
        "train__eval_every": 4,
        "recovery__copies": "next",
        "runtime__lease_s": LEASE_S,
        **changes,
    }
    job, out, plan = (cluster.folder / name for name in (f"{name}.toml", name, f"{name}.json"))
    job.write_text(cluster.job(**wanted).to_toml())
    plan.write_text(json.dumps(cluster.plan_on(cluster.job(**wanted), RING).to_json()))
    where = ("--coordinator", cluster.address, "--plan", plan)
    done = run_here(TEMPLATE.get, "-vv", "train", job, *where, "--out", out)
    return out, f"{done.returncode}\n{done.stdout}\n{done.stderr}"


def places(cluster: Watched, printed: str, logged: str) -> dict[str, bytes]:
    """Everything that anybody but an owner may look at, by where it is; logs of owners too."""
    found = {"ring": cluster.traffic(of_ring=True), "control": cluster.traffic(of_ring=False)}
    found |= {"submitter's output": printed.encode(), "coordinator's log": logged.encode()}
    folders = ("kept", "state", "good", "bad", "diverged")
    files = [path for name in folders for path in (cluster.folder / name).rglob("*") if path.is_file()]
    files += [cluster.folder / f"{name}.log" for name in cluster.names]
    return found | {str(path.relative_to(cluster.folder)): path.read_bytes() for path in files}


@pytest.mark.promise("4 labels stay")
def test_canaries_of_rows_and_labels_stay_with_their_owner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that ends well, one with a gradient that is not finite, and one with a row that can't be read."""
    caplog.set_level(logging.DEBUG)
    with watched(tmp_path) as cluster:
        out, good = train(cluster, "good")
        assert good.startswith("0\n"), good
        order_failure(tmp_path / "failpoints", "node-2", "after backward 4 spoil")
        _, diverged = train(cluster, "diverged", recovery__copies="none")
        assert diverged.startswith("1\n") and "rows" in diverged, diverged
        with Path(cluster.train).open("a", encoding="utf-8") as file:
            file.write(f"{BAD_ROW},{BAD_ROW},{BAD_ROW}\n")
        _, bad = train(cluster, "bad")
        assert "has 3 cells" in bad, bad
        found = places(cluster, good + diverged + bad, caplog.text)
        plan = Plan.from_json(_plan_part(read_run_file(out / "plan.json")))

    links = json.loads((out / "report.json").read_text())["links"]
    assert len(found["ring"]) > sum(links.values()) > 500_000 and len(found["control"]) > 50_000
    for part in ("kept/", "state/node-2/", "good/", "diverged/", "node-0.log", "coordinator's log"):
        assert any(place.startswith(part) and content for place, content in found.items()), f"nothing in {part}"
    assert b"DEBUG edge.agent" in found["node-0.log"] and "INFO" in caplog.text

    def with_a_row(content: bytes) -> list[bytes]:
        return ROW.findall(content)

    assert with_a_row(Path(cluster.train).read_bytes())  # the search finds what is there
    assert {place: with_a_row(content) for place, content in found.items() if with_a_row(content)} == {}
    for name in CLASSES:
        assert name.encode() in found["control"]  # the list of names, which is the same search
        quiet = [place for place in found if place in ("ring", "node-2.log") or place.startswith("state/")]
        assert [place for place in quiet if name.encode() in found[place]] == []
    assert LABELS.search(", ".join(CLASSES * 2).encode())  # labels of four rows; a list of the names has two
    assert [place for place, content in found.items() if LABELS.search(content)] == []

    with_rows = Path(cluster.train).read_text().splitlines(keepends=True)[:-1]
    Path(cluster.train).write_text("".join(with_rows))
    numbers = numbers_of(cluster, plan)
    assert {place: said for place, content in found.items() if (said := find_numbers(content, numbers))} == {}


def test_search_for_numbers_finds_what_is_there() -> None:
    """Negative control: ids are found in each encoding."""
    row = [2, 70, 9, 101, 3, 50]
    for name, needle in encodings(row):
        assert find_numbers(b"xx" + needle + b"yy", [row]), name
    assert find_numbers(b"".join(varint(number) for number in (2, 300, 70)), [[2, 44, 70]]) == []

"""What is on the wire: hidden states, and neither token ids nor texts nor labels."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from edge.data.dataset import OwnerDataset
from ringtune.schedule.turns import items, turn_sequence
from ringtune.v1 import control_pb2
from tests.support import tiny
from tests.support.cluster import Cluster, Outcome, running
from tests.support.tap import Tap

pytestmark = pytest.mark.slow

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


def secrets_of(cluster: Cluster) -> tuple[list[str], list[list[int]]]:
    """Every text of the owners, and the first token ids of every text that is long enough."""
    texts = []
    for path in (cluster.train, cluster.eval):
        with Path(path).open(encoding="utf-8") as file:
            texts += [row["text"] for row in csv.DictReader(file)]
    number = {word: index for index, word in enumerate(tiny.vocabulary())}
    ids = [[number["[CLS]"], *(number[word] for word in text.split())] for text in texts]
    return texts, [row[:IDS_IN_A_ROW] for row in ids if len(row) >= IDS_IN_A_ROW]


def targets_of(cluster: Cluster, outcome: Outcome) -> list[list[int]]:
    """The labels of every batch of a run as numbers, in the order of its rows.

    Batches whose labels change less than four times are left out: an attention mask may look like them.
    """
    assert outcome.plan is not None
    course = outcome.plan.course
    found: set[tuple[int, ...]] = set()
    for share, owner in enumerate(cluster.owners):
        data = OwnerDataset.load(
            cluster.job(), cluster.train, cluster.eval, share=share, num_owners=2, tokenizer_folder=cluster.model
        )
        data.set_labels(course.labels)
        for turn in turn_sequence(course):
            batches = (data.batch(course, item) for item in items(course, turn) if turn.owner == owner)
            found.update(tuple(batch.labels.tolist()) for batch in batches if batch.labels is not None)
    return [list(row) for row in sorted(found) if sum(a != b for a, b in itertools.pairwise(row)) >= MIN_CHANGES]


@contextlib.contextmanager
def tapped(folder: Path, *, delay_s: float = 0.0) -> Iterator[tuple[Cluster, dict[str, Tap]]]:
    """A cluster whose agents are reached through taps."""
    cluster = Cluster(folder, owners=["node-0", "node-1"], hosts=["node-2"])
    taps = {name: Tap(cluster.ports[name], delay_s=delay_s) for name in cluster.names}
    cluster.advertised = {name: tap.port for name, tap in taps.items()}
    with cluster.listening():
        yield cluster, taps
    for tap in taps.values():
        tap.close()


def ring_bytes(taps: dict[str, Tap]) -> bytes:
    """Everything that went over links of the ring, both ways."""
    flows = [flow for tap in taps.values() for flow in tap.flows if flow.is_ring]
    return b"".join(bytes(flow.sent) + bytes(flow.received) for flow in flows)


def control_bytes(taps: dict[str, Tap]) -> bytes:
    """Everything that the coordinator and the agents told each other through the taps."""
    flows = [flow for tap in taps.values() for flow in tap.flows if not flow.is_ring]
    return b"".join(bytes(flow.sent) + bytes(flow.received) for flow in flows)


def class_names_in(content: bytes) -> list[str]:
    """The classes that stand somewhere as a field of a message or as JSON.

    Three bare letters stand in a megabyte of random numbers in one run of twenty.
    """
    return [
        label
        for label in tiny.LABELS
        if bytes([len(label)]) + label.encode() in content or f'"{label}"'.encode() in content
    ]


def test_traffic_search_finds_what_is_there() -> None:
    """The search itself can fail: ids are found in each encoding."""
    row = [2, 300, 70, 9, 150, 3]
    for name, needle in [(code, found) for code, found in encodings([n & 127 for n in row])]:
        assert find_numbers(b"xx" + needle + b"yy", [[n & 127 for n in row]]), name
    assert find_numbers(b"".join(varint(n) for n in row), [[n & 127 for n in row]]) == []
    assert class_names_in(control_pb2.ReportRequest(node=tiny.LABELS[0]).SerializeToString()) == [tiny.LABELS[0]]
    assert class_names_in(json.dumps({"label": tiny.LABELS[1]}).encode()) == [tiny.LABELS[1]]


@pytest.mark.promise("4 labels stay")
def test_traffic_has_no_token_ids_and_no_labels(tmp_path: Path) -> None:
    """A run's links carry as many bytes as reported, and none of an owner's ids, texts, class names or labels."""
    with tapped(tmp_path) as (cluster, taps):
        outcome: Outcome = cluster.run(cluster.job())
        assert outcome.is_done, outcome.message
        texts, rows = secrets_of(cluster)
        ring, control = ring_bytes(taps), control_bytes(taps)
        assert len(ring) > sum(outcome.report["links"].values()) > 500_000
        assert len(rows) > 50
        assert find_numbers(ring, rows) == []
        assert class_names_in(ring) == []
        targets = targets_of(cluster, outcome)
        assert len(targets) > 3
        assert find_numbers(ring + struct.pack(f"<{len(targets[0])}q", *targets[0]), targets) == [f"{targets[0]} as <q"]
        assert find_numbers(ring, targets) == []
        assert find_numbers(control, targets) == []
        assert [text for text in texts if text.encode() in ring + control] == []
        assert find_numbers(control, rows) == []


def texts_in(path: Path, texts: Sequence[str]) -> list[str]:
    """Which texts are in a file, or in any file of a folder, as they are or as JSON has them."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    assert files, f"{path} has nothing to look at"
    found = []
    for file in files:
        content = file.read_bytes()
        found += [f"{text!r} in {file}" for text in texts if text.encode() in content]
    return found


@pytest.mark.promise("4 labels stay")
@pytest.mark.thorough
def test_rows_and_labels_are_in_no_log_and_in_no_folder_of_another_node(tmp_path: Path) -> None:
    """Shards are saved, everybody logs all there is: no text, token ids or labels of a batch are in any of it."""
    with running(tmp_path, owners=["node-0", "node-1"], hosts=["node-2"]) as cluster:
        outcome = cluster.run(cluster.job(train__checkpoint_every=2))
        assert outcome.is_done, outcome.message
        texts, rows = secrets_of(cluster)
        targets = targets_of(cluster, outcome)
        logs = [cluster.folder / f"{name}.log" for name in cluster.names]
        folders = [cluster.folder / "state" / name for name in cluster.names]
        assert sum(len(list(folder.rglob("step-*.safetensors"))) for folder in folders) >= 3
        assert texts_in(Path(cluster.train), texts[:1])  # the search can find something
        assert all("INFO" in log.read_text(errors="replace") for log in logs)
        for path in (*logs, *folders):
            assert texts_in(path, texts) == []
        for file in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
            assert find_numbers(file.read_bytes(), rows) == [], file
            assert find_numbers(file.read_bytes(), targets) == [], file
        told = json.dumps([outcome.metrics, outcome.steps, outcome.report, outcome.operations])
        assert [text for text in texts if text in told] == []
        sent = b"".join(bytes(content) for content in outcome.files.values())
        assert [text for text in texts if text.encode() in sent] == []
        assert find_numbers(sent, [*rows, *targets]) == []


@pytest.mark.promise("5 timing changes nothing")
def test_traffic_delays_do_not_change_the_result(cluster: Cluster, tmp_path: Path) -> None:
    """Every piece of every message held back for up to 5 ms: the same adapter and head, to the last bit."""
    wanted = cluster.run(cluster.job())
    with tapped(tmp_path, delay_s=0.005) as (slow, _):
        found = slow.run(slow.job())
    assert found.is_done, found.message
    for name in ("adapter/adapter.safetensors", "adapter/model_head.safetensors"):
        assert found.files[name] == wanted.files[name]

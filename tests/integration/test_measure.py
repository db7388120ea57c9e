"""Real agents measure themselves and their links, remember it, and a run uses what they found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge.checkpoint.state_folder import CACHE_FILE
from ringtune.costs.profile import WHOLE_WORKS, Profile, Work
from tests.support import tiny
from tests.support.cluster import TEMPLATE
from tests.support.typed import run_here

pytestmark = pytest.mark.slow

JOB = """
[model]
path = "model"
[data]
train = "train.csv"
eval = "eval.csv"
[runtime]
lease_s = 30.0
[train]
batch_size = 8
microbatches = 2
max_length = 16
local_iterations = 4
rounds = 2
[unfreeze]
every_steps = 4
"""


def ringtune(state: Path, *arguments: object) -> list[dict[str, Any]]:
    """Run a command with JSON lines, whose local nodes remember what they measure in a folder; it has to succeed."""
    done = run_here(TEMPLATE.get, *arguments, "--json", XDG_STATE_HOME=str(state))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_nodes(profile: Profile, *, owners: tuple[str, ...]) -> None:
    """What nodes that have data, and others, say of themselves: figures that a machine of today can have."""
    for node in profile.nodes:
        works = {point.work for point in node.work_times}
        owns = {Work.EMBED, Work.HEAD, Work.HEAD_FREE, Work.UPDATE_HEAD, Work.HAND_OVER}
        every = {*WHOLE_WORKS, Work.FIT}
        assert works == (every if node.node in owners else every - owns)
        assert all(1e-7 < point.low_s <= point.median_s <= point.high_s < 5 for point in node.work_times)
        assert node.block_forward_s > 0 and node.hardware
        assert (4 < node.train_tokens <= 16) == (node.node in owners)


def check_links(profile: Profile) -> None:
    """A link each way between any two nodes."""
    names = [node.node for node in profile.nodes]
    assert {(link.source, link.target) for link in profile.links} == {(a, b) for a in names for b in names if a != b}
    for link in profile.links:
        assert 1e5 < link.rate_low_bytes_per_s <= link.rate_bytes_per_s <= link.rate_high_bytes_per_s < 1e12
        assert 1e-6 < link.latency_s < 1


def check_rehearsal(measured: Profile, rehearsed: Profile) -> None:
    """The ring did each kind of work of a step, so each of them has other times than those that were measured."""
    for before, after in zip(measured.nodes, rehearsed.nodes, strict=True):
        assert {point.work for point in after.work_times} == {point.work for point in before.work_times}
        old = {(point.work, point.size): point.median_s for point in before.work_times}
        new = {(point.work, point.size): point.median_s for point in after.work_times}
        for work in (Work.FORWARD, Work.BACKWARD, Work.UPDATE):
            assert all(new[key] != old[key] for key in old.keys() & new.keys() if key[0] == work)
        assert after.has_messages


def test_measure_on_local_nodes_is_remembered_and_used_by_a_run(tmp_path: Path) -> None:
    """The command measures nodes, then only what it has not measured yet, rehearses, and training takes the profile."""
    tiny.write_model(tmp_path / "model", num_blocks=2)
    tiny.write_rows(tmp_path / "train.csv", 40, seed=1)
    tiny.write_rows(tmp_path / "eval.csv", 20, seed=2)
    job, out = tmp_path / "job.toml", tmp_path / "profile.json"
    job.write_text(JOB)
    (alone,) = ringtune(tmp_path / "state", "measure", job, "--local", "2", "--no-links", "--no-rehearsal")
    found = Profile.from_json(alone["profile"])
    check_nodes(found, owners=("node-0", "node-1"))
    remembered = {path: path.read_bytes() for path in tmp_path.glob(f"state/ringtune/*/{CACHE_FILE}")}
    assert len(remembered) == 2
    ringtune(tmp_path / "state", "measure", job, "--local", "2", "--save", out)
    rehearsed = Profile.from_json(json.loads(out.read_text()))
    check_links(rehearsed)
    check_rehearsal(found, rehearsed)
    assert not list(tmp_path.glob("state/ringtune/*/runs/*")), "nothing of a rehearsal stays"
    assert remembered == {path: path.read_bytes() for path in remembered}, "neither its times nor new ones"
    run = tmp_path / "run"
    ringtune(tmp_path / "state", "train", job, "--local", "2", "--out", run, "--profile", out)
    left = Profile.from_json(json.loads((run / "profile.json").read_text()))
    assert left.links == rehearsed.links
    recorded = {point.work: point.samples for node in left.nodes for point in node.work_times}
    measured = {point.work: point.samples for node in found.nodes for point in node.work_times}
    assert recorded[Work.HEAD] >= 16 > measured[Work.HEAD]

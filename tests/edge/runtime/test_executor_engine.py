"""Executors under real engines, with messages delivered in any order that links allow: timing changes nothing."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from edge.data.dataset import OwnerDataset
from ringtune.engine import events as ev
from ringtune.engine.node_engine import NodeEngine
from ringtune.job.job import Job
from ringtune.schedule.actions import TensorKey
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import turn_sequence
from ringtune.storage.pieces import Pieces
from tests.support import hand_ring as ring
from tests.support import reference, tiny


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tiny model for all tests of this file."""
    return tiny.write_model(tmp_path_factory.mktemp("model"))


@dataclass(slots=True)
class Post:
    """Engines and executors in one process; every (source, target) pair is a queue, and ``rng`` picks the next one.

    Attributes:
        hand: holds the executors.
        rng: picks whose event is handled next.
        peak_bytes: most that each node held at any time.
    """

    hand: ring.HandRing
    rng: random.Random
    engines: dict[str, NodeEngine] = field(default_factory=dict)
    links: dict[tuple[str, str], deque[ev.Event]] = field(default_factory=lambda: defaultdict(deque))
    tensors: dict[tuple[str, TensorKey], tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)
    heads: dict[int, Pieces] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    losses: dict[int, float] = field(default_factory=dict)

    def run(self, plan: Plan) -> None:
        """Grant every turn at once and deliver until nothing is left."""
        self.engines = {node: NodeEngine(plan, node) for node in plan.nodes}
        turns = list(turn_sequence(plan.course))
        for node in plan.nodes:
            for turn in turns:
                self.hand.nodes[node].grant(turn)
                self.links["coordinator", node].append(ev.TurnGranted(turn))
        while waiting := [link for link in sorted(self.links) if self.links[link]]:
            source, node = self.rng.choice(waiting)
            for command in self.engines[node].handle(self.links[source, node].popleft(), 0.0):
                self._carry_out(node, command)
            self.peak_bytes[node] = max(self.peak_bytes[node], self.hand.nodes[node].live_bytes())
        assert all(engine.is_idle for engine in self.engines.values())

    def _carry_out(self, node: str, command: ev.Command) -> None:
        executor = self.hand.nodes[node]
        match command:
            case ev.RunAction(action):
                self.links[node, node].append(ev.ActionDone(action, executor.run(action)))
            case ev.SendTensor(key, target):
                tensor, mask = executor.take_tensor(key)
                copy = None if mask is None else mask.to(torch.int8)
                self.tensors[target, key] = (tensor.clone(), copy)
                self.links[node, target].append(ev.TensorArrived(key, node))
            case ev.Accept(key, source):
                executor.put_tensor(key, *self.tensors.pop((node, key)))
                if key.is_hidden:
                    self.links[node, source].append(ev.CreditArrived(key.boundary, node))
            case ev.SendHead(turn, target):
                self.heads[turn] = executor.head_blob()
                self.links[node, target].append(ev.HeadArrived(turn, node))
                self.hand.holder = target
            case ev.AcceptHead(turn, _):
                executor.load_head_blob(self.heads.pop(turn))
            case ev.ReportTurn(turn):
                executor.forget_turn(turn)
            case ev.ReportStep(_, step, "train", values):
                found = dict(values)
                self.losses[step] = found["loss_sum"] / found["count"]
            case ev.Fail(_, message):
                pytest.fail(message)


_REFERENCES: dict[str, reference.Trained] = {}


def _reference(job: Job, plan: Plan, datasets: dict[str, OwnerDataset]) -> reference.Trained:
    """One for each job, whatever the order of delivery."""
    key = repr(job)
    if key not in _REFERENCES:
        _REFERENCES[key] = reference.train(job, plan, Path(job.model.path), datasets)
    return _REFERENCES[key]


@pytest.mark.promise("1 partition invariance")
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("private", [0, 1])
@pytest.mark.sampled(1)
def test_executor_under_engines_equals_one_process(model_folder: Path, tmp_path: Path, seed: int, private: int) -> None:
    """Many batches in flight, two owners, dropout, random delivery: still exactly one process."""
    job = ring.make_job(
        model_folder,
        train__microbatches=2,
        train__max_steps=12,
        train__local_iterations=4,
        train__dropout=0.1,
        train__eval_every=6,
        unfreeze__every_steps=3,
        privacy__private_blocks=private,
    )
    datasets = ring.make_datasets(job, model_folder, tmp_path, ("a", "c"), eval_rows=9)
    plan = ring.make_plan(job, datasets, {"b": (private, 2), "c": (2, 3), "d": (3, 4)})
    post = Post(hand=ring.HandRing(plan, job, model_folder, datasets), rng=random.Random(seed))
    post.run(plan)
    expected = _reference(job, plan, datasets)
    got, want = post.hand.tensors(), {**expected.adapter(), **expected.head()}
    assert got.keys() == want.keys()
    assert max(float((got[name] - want[name]).abs().max()) for name in want) <= 1e-9
    assert [post.losses[step] for step in range(12)] == pytest.approx(expected.losses, abs=1e-9)
    assert not post.tensors
    assert {node: executor.live_bytes() for node, executor in post.hand.nodes.items()} == dict.fromkeys(plan.nodes, 0)


def test_executor_under_engines_holds_no_more_for_more_batches(model_folder: Path, tmp_path: Path) -> None:
    """What a frozen slice holds at most doesn't grow with the number of batches that pass it."""
    peaks = []
    for steps in (4, 24):
        job = ring.make_job(model_folder, train__max_steps=steps, train__local_iterations=steps)
        job = job.with_overrides({"unfreeze.every_steps": 100})
        datasets = ring.make_datasets(job, model_folder, tmp_path, ("a",))
        plan = ring.make_plan(job, datasets, {"b": (0, 2), "c": (2, 4)})
        post = Post(hand=ring.HandRing(plan, job, model_folder, datasets), rng=random.Random(0))
        post.run(plan)
        peaks.append(post.peak_bytes["b"])
    widest = 6 * 16 * 32 * 8 + 6 * 16 * 16 * 8 + 6 * 16 * 8  # hidden state, 4-D mask, 2-D mask
    assert 0 < peaks[0] <= widest * 2
    assert peaks[1] <= peaks[0] * 2
    assert peaks[1] <= widest * 2

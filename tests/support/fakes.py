"""Stand-ins for torch and the network: a ring of ``AgentRun`` in one process, instant and without sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from edge.machine.libraries import ComputeThread
from edge.runtime import reporter as rp
from edge.runtime.loop import AgentRun
from ringtune.engine.events import HeadArrived, ParcelArrived, TensorArrived
from ringtune.schedule.actions import Action, Op, TensorKey
from ringtune.schedule.lowering import links as plan_links
from ringtune.schedule.operation_tables import BlockScores
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, Turn, turn_sequence
from ringtune.storage.pieces import Pieces

WAIT_S = 60.0


class FakeExecutor:
    """Computes nothing; keeps a log of what it was asked."""

    def __init__(
        self,
        on_action: Callable[[Action], None] = lambda action: None,
        scores: Callable[[int], tuple[BlockScores, ...]] = lambda turn: (),
    ) -> None:
        self.hosted_bytes, self.copied = 7, ""
        self.run_figures = {"peak_versions": 2, "peak_version_bytes": 5}
        self.techniques: dict[str, Any] = {}
        self.log: list[Any] = []
        self.head_log: list[str] = []
        self.held: dict[tuple[str, int, int], Any] = {}
        self.turns: set[int] = set()
        self._on_action = on_action
        self.take_scores = scores

    def copy_digest(self, unit: int, stop: int) -> str:
        """A digest that shows after which action it was taken."""
        return f"{unit} after {self.log[-1]}"

    def grant(self, turn: Turn) -> None:
        """A turn begins."""
        self.turns.add(turn.index)

    def forget_turn(self, index: int) -> str:
        """A turn ends."""
        self.turns.remove(index)
        return ""

    def run(self, action: Action) -> tuple[tuple[str, float], ...]:
        """Pretend to compute."""
        self._on_action(action)
        self.log.append(action)
        return (("correct", 1.0), ("count", 1.0), ("loss_sum", 0.5)) if action.op is Op.HEAD else ()

    def put_tensor(self, key: TensorKey, tensor: Any, mask: Any) -> None:
        """A tensor comes in."""
        self.held[key.payload, key.seq, key.micro] = tensor

    def take_tensor(self, key: TensorKey) -> tuple[Any, Any]:
        """A tensor goes out."""
        return f"{key.payload}{key.seq}.{key.micro}", None

    def head_blob(self) -> Pieces:
        """The head goes out."""
        self.head_log.append("sent")
        return Pieces.of(b"head")

    def load_head_blob(self, data: Pieces) -> None:
        """The head comes in."""
        self.head_log.append("came")
        self.log.append(bytes(data))

    def take_parcel(self, key: TensorKey) -> Pieces:
        """A parcel goes out."""
        return Pieces.of(f"{key.seq}/{key.boundary}".encode())

    def put_parcel(self, key: TensorKey, data: Pieces) -> None:
        """A parcel comes in."""
        self.log.append(bytes(data))

    def drop_head_state(self) -> None:
        """The head went out, and is not needed here any more."""
        self.head_log.append("dropped")

    def load_saved(self, folder: Path) -> None:
        """A saved adapter comes in."""
        self.log.append({path.name: path.read_bytes() for path in folder.iterdir()})

    def rows_digest(self, run_id: str) -> str:
        """Of no rows."""
        return ""

    def shard(self, metadata: Mapping[str, str], *, with_head: bool) -> Pieces:
        """A checkpoint's part."""
        self.head_log += ["saved"] if with_head else []
        return Pieces.of(json.dumps({**metadata, "head": with_head}).encode())

    def adapter_files(self, *, with_head: bool, with_private: bool) -> dict[str, Pieces]:
        """The results."""
        files = {"adapter.safetensors": b"a" * 3, **({"model_head.safetensors": b"h"} if with_head else {})}
        return {name: Pieces.of(content) for name, content in files.items()}


class KeptReports:
    """Keeps what a run reports, and wakes who waits for it."""

    def __init__(self) -> None:
        self.entries: list[rp.Entry] = []
        self._changed = threading.Condition()

    def put(self, entry: rp.Entry) -> None:
        """Keep an entry."""
        with self._changed:
            self.entries.append(entry)
            self._changed.notify_all()

    def wait_for(self, predicate: Callable[[Sequence[rp.Entry]], bool]) -> bool:
        """Wait until the entries satisfy ``predicate``."""
        with self._changed:
            return self._changed.wait_for(lambda: predicate(self.entries), WAIT_S)

    def of(self, kind: type) -> list[Any]:
        """The entries of one kind."""
        return [entry for entry in list(self.entries) if isinstance(entry, kind)]


class DirectLink:
    """A link that hands over at once, on the caller's thread."""

    waiting: Action | None = None

    def __init__(self, source: str, find: Callable[[], AgentRun]) -> None:
        self._source = source
        self._find = find
        self.is_closed = False

    def send_tensor(self, key: TensorKey, tensor: Any, mask: Any) -> int:
        """Deliver a tensor; says it has 100 bytes."""
        self._find().on_arrival(TensorArrived(key, self._source), (tensor, mask))
        return 100

    def send_parcel(self, key: TensorKey, data: Pieces) -> int:
        """Deliver a parcel."""
        self._find().on_arrival(ParcelArrived(key, self._source), data)
        return data.size_bytes

    def send_head(self, turn: int, data: Pieces) -> int:
        """Deliver a head."""
        self._find().on_arrival(HeadArrived(turn, self._source), data)
        return data.size_bytes

    def close(self) -> None:
        """Remember it."""
        self.is_closed = True


class FakeRing:
    """All nodes of a plan as runs with fake executors, linked directly."""

    def __init__(
        self,
        plan: Plan,
        *,
        executors: dict[str, FakeExecutor] | None = None,
        wait_s: float = 300.0,
        record: bool = False,
        savers: Mapping[str, Any] | None = None,
        start: StartPoint | None = None,
    ) -> None:
        self.plan = plan
        self.start_point = start
        self.executors = {node: (executors or {}).get(node) or FakeExecutor() for node in plan.nodes}
        self.reports = {node: KeptReports() for node in plan.nodes}
        self.runs: dict[str, AgentRun] = {}
        self._threads = {node: ComputeThread(f"compute-{node}") for node in plan.nodes}
        for node in plan.nodes:
            targets = [target for source, target in plan_links(plan, start) if source == node]
            links = {target: DirectLink(node, partial(self.runs.__getitem__, target)) for target in targets}
            stand_ins: dict[str, Any] = {
                "executor": self.executors[node],
                "links": links,
                "reports": self.reports[node],
            }
            self.runs[node] = AgentRun(
                plan=plan,
                node=node,
                ack=partial(self._ack, node),
                **stand_ins,
                wait_s=wait_s,
                record=record,
                saver=(savers or {}).get(node),
                start=start,
            )

    def _ack(self, node: str, source: str, boundary: int) -> None:
        self.runs[source].on_credits(node, boundary, 1)

    def start(self, *nodes: str) -> None:
        """Start these nodes' loops, all by default."""
        for node in nodes or self.plan.nodes:
            self._threads[node].submit(self.runs[node].loop)

    def grant_all(self) -> tuple[Turn, ...]:
        """Grant every turn of the plan."""
        turns = tuple(turn_sequence(self.plan.course, start=self.start_point))
        for run in self.runs.values():
            run.grant(turns)
        return turns

    def wait_done(self, num_turns: int) -> bool:
        """Wait until every node has reported every turn."""
        return all(
            reports.wait_for(lambda entries: sum(isinstance(entry, rp.TurnDone) for entry in entries) == num_turns)
            for reports in self.reports.values()
        )

    def close(self) -> bool:
        """Stop all; whether every loop ended."""
        for run in self.runs.values():
            run.stop("the test ends")
        ended = [thread.close(WAIT_S) for thread in self._threads.values()]
        return all(ended)

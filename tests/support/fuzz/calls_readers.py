"""What reads the messages of calls, once protobuf has taken them apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from google.protobuf.message import DecodeError

from coordinator.server.server import entry_of, member_of
from ringtune.models.weights_by_digest import ModelSource, manifest_from_proto, manifest_to_proto, pieces_from_proto
from ringtune.schedule.turns import turn_sequence
from ringtune.transport.codecs import GrantReader, GrantWriter, check_report, scores_from_proto
from ringtune.v1 import control_pb2, weights_pb2
from tests.support.choosing import make_choice, table_of
from tests.support.fuzz.reader import Reader
from tests.support.plans import changed, make_plan
from tests.support.weights_parts import write_bert


def readers() -> tuple[Reader, ...]:
    """Make them."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], checkpoint_every=2, eval_every=2)
    chosen = changed(plan, choice=make_choice())
    table = table_of(chosen.course, 0)
    turns = list(turn_sequence(plan.course))
    with_table = [dataclasses.replace(turns[0], operations=table)]
    grants = [GrantWriter("r").request(some) for some in (with_table, with_table * 3)]
    report = control_pb2.ReportRequest(run_id="r", node="a", number=1)
    step = report.steps.add()
    step.seq, step.kind = 0, "train"
    scores = control_pb2.SubnetScores(owner="a", scores=2, subnets=1, values=bytes(32))
    joined = control_pb2.JoinRequest(node="a", address="127.0.0.1:1", version="1")
    manifest = ModelSource(write_bert(Path(mkdtemp(prefix="ringtune-fuzz-")) / "model")).manifest
    asked = weights_pb2.FetchRequest(pieces=[{"sha256": bytes(32), "offset": 0}])
    return (
        _of("grant", grants, lambda message: GrantReader(chosen.course).turns(message)),
        _of("report", [report], lambda message: check_report(message, last=0, nodes=("a", "b"), end_seq=100)),
        _of("scores", [scores], scores_from_proto),
        _of("join", [joined], lambda message: entry_of(member_of(message), "idle", 0.0)),
        _of("model manifest", [manifest_to_proto(manifest)], lambda message: manifest_from_proto(message).digest),
        _of("pieces", [asked], pieces_from_proto),
    )


def _of(name: str, messages: list[Any], read: Callable[[Any], object]) -> Reader:
    kind = type(messages[0])

    def whole(data: bytes) -> None:
        try:
            message = kind.FromString(data)
        except DecodeError:
            return  # the wire answers these itself
        read(message)

    return Reader(name=name, seeds=tuple(one.SerializeToString() for one in messages), read=whole)

"""Check that a coordinator answers, runs the same version, and has the same time."""

from __future__ import annotations

import time
from typing import NamedTuple

import grpc

from edge.doctor.check import Check, failed, passed, warned
from ringtune import __version__
from ringtune.quantities import format_seconds
from ringtune.rpc.connections import open_channel
from ringtune.rpc.refusals import why_refused
from ringtune.rpc.versions import is_compatible
from ringtune.trust.parties import COORDINATOR
from ringtune.v1 import control_pb2, control_pb2_grpc

_CALL_S = 5.0
_NUM_CALLS = 3
_MUCH_SKEW_S = 1.0


class Answer(NamedTuple):
    """A coordinator's answer: its version, the seconds that its clock is ahead, and those that the answer took."""

    version: str
    skew_s: float
    round_trip_s: float


def check_coordinator(address: str) -> list[Check]:
    """Check connection, version and clock of a coordinator, a line each."""
    channel = open_channel(address, peer=COORDINATOR)
    try:
        stub = control_pb2_grpc.CoordinatorStub(channel)
        answers = [_ask(stub) for _ in range(_NUM_CALLS)]
    except grpc.RpcError as error:
        status = error.code().name if isinstance(error, grpc.Call) else type(error).__name__
        why = why_refused(address, COORDINATOR, time.time())
        if why:
            return [failed("coordinator", f"{address} can't be talked to ({status})", why)]
        remedy = "start it with 'ringtune coordinator', check address, firewall and the Wi-Fi's client isolation"
        return [failed("coordinator", f"{address} does not answer ({status})", remedy)]
    finally:
        channel.close()
    return judge(address, min(answers, key=lambda answer: answer.round_trip_s))


def _ask(stub: control_pb2_grpc.CoordinatorStub) -> Answer:
    start_s, start_unix_s = time.perf_counter(), time.time()
    reply = stub.Status(control_pb2.Empty(), timeout=_CALL_S, wait_for_ready=True)
    took_s = time.perf_counter() - start_s
    return Answer(reply.version, reply.now_unix_s - (start_unix_s + took_s / 2), took_s)


def judge(address: str, answer: Answer) -> list[Check]:
    """Judge a coordinator's answer: same version, and a clock within a second and half the round trip."""
    reached = passed("coordinator", f"{address} answers in {format_seconds(answer.round_trip_s)}")
    found = f"{answer.version}, here {__version__}"
    version = (
        passed("its version", answer.version)
        if is_compatible(answer.version)
        else failed("its version", found, "install the same version on both; it takes no others")
    )
    uncertain_s = answer.round_trip_s / 2
    ahead = "ahead" if answer.skew_s > 0 else "behind"
    skew = f"{abs(answer.skew_s):.3f} s {ahead} of this one, give or take {uncertain_s:.3f} s"
    clock = (
        passed("its clock", skew)
        if abs(answer.skew_s) <= _MUCH_SKEW_S + uncertain_s
        else warned("its clock", skew, "set the time of both (timedatectl); the dates in their logs differ")
    )
    return [reached, version, clock]

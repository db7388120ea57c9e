"""Members as messages, and back."""

from __future__ import annotations

from coordinator.members.registry import Member
from ringtune.v1 import control_pb2


def member_of(request: control_pb2.JoinRequest) -> Member:
    """What an agent said of itself."""
    return Member(
        node=request.node,
        address=request.address,
        instance=request.instance,
        version=request.version,
        has_data=request.has_data,
        memory_bytes=request.memory_bytes,
        device=request.device,
        threads=request.threads,
        system=request.system,
        is_guest=request.is_guest,
    )


def entry_of(member: Member, state: str, seen_s: float) -> control_pb2.NodeEntry:
    """What users are told of it."""
    return control_pb2.NodeEntry(joined=_joined(member), state=state, seen_s=seen_s, rss_bytes=member.rss_bytes)


def _joined(member: Member) -> control_pb2.JoinRequest:
    return control_pb2.JoinRequest(
        node=member.node,
        address=member.address,
        version=member.version,
        has_data=member.has_data,
        memory_bytes=member.memory_bytes,
        device=member.device,
        threads=member.threads,
        system=member.system,
        is_guest=member.is_guest,
    )

"""The checked-in generated code is what the ``.proto`` files give, and what they must not have."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from ringtune.v1 import control_pb2, ring_pb2

_PROTO = Path(__file__).resolve().parents[2] / "proto"


def _generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ringtune_generate", _PROTO / "generate.py")
    if spec is None or spec.loader is None:
        raise ImportError("proto/generate.py is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_code_is_up_to_date() -> None:
    """A change of a ``.proto`` file comes with its generated code."""
    pytest.importorskip("grpc_tools")
    assert _generate().outdated() == ()


@pytest.mark.promise("4 labels stay")
def test_proto_ring_has_no_field_for_labels_or_token_ids() -> None:
    """What an owner keeps has no place in a message of the data plane."""
    names = {field.name for message in _messages(ring_pb2) for field in message.fields}
    assert names
    assert not {name for name in names if re.search(r"label|token|text|ids\b|input", name)}


def test_proto_every_field_says_who_sends_it() -> None:
    """Each field and enum value has its comment in the same line."""
    for path in sorted((_PROTO / "ringtune" / "v1").glob("*.proto")):
        bare = [line for line in path.read_text().splitlines() if re.search(r"= \d+;", line) and "//" not in line]
        assert bare == []


def test_proto_whole_numbers_of_a_run_have_64_bits() -> None:
    """``seq``, ``step`` and byte counts of a long run do not wrap."""
    wide = {FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64}
    fields = [field for module in (ring_pb2, control_pb2) for message in _messages(module) for field in message.fields]
    for field in fields:
        if field.name in ("seq", "step", "payload_bytes", "rss_bytes", "memory_bytes", "hosted_bytes", "bytes"):
            assert field.type in wide, field.full_name


def _messages(module: ModuleType) -> list[Descriptor]:
    return list(module.DESCRIPTOR.message_types_by_name.values())

"""What a node refuses of the pairs and weights that come: another item's, another version's, another shape's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from edge.techniques.offload.pairs import from_file, to_file
from ringtune.errors import DivergedError, IntegrityError
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile
from sim.ring import VirtualRing
from tests.support.torch_ring import Case, make_carrier, write_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, payload: str, change: Any) -> None:
    """Host a with helper z; what comes of a kind is changed: (bytes, bytes of the one before, node) -> bytes."""
    case = Case(folder=folder, method="all", num_steps=3, microbatches=2, every_steps=4, owners=("a",))
    plan = case.plan((("a", 0, 4),))
    placement = dataclasses.replace(plan.placement, helpers=(Helper(node="z", start=0, stop=4),))
    carrier = make_carrier(case, Plan(plan.course, (placement,)))
    put, before = carrier.put_parcel, {"data": b""}

    def meddled(node: str, key: TensorKey, content: Pieces) -> None:
        if key.payload == payload:
            data = bytes(content)
            before["data"], content = data, Pieces.of(change(data, before["data"]))
        put(node, key, content)

    monkeypatch.setattr(carrier, "put_parcel", meddled)
    VirtualRing(
        Plan(plan.course, (placement,)),
        action_s=lambda node, action: 0.01,
        message_s=lambda source, target, payload: 0.01,
        carrier=carrier,
    ).run()


def metadata_of(data: bytes) -> dict[str, str]:
    """What a parcel says that it is of."""
    return dict(TensorFile(Pieces.of(data), where="a parcel").metadata)


def repeated(data: bytes, before: bytes) -> bytes:
    """The parcel that came before, once more."""
    return before or data


def cut(data: bytes, before: bytes) -> bytes:
    """The first tensor has lost its last value."""
    tensors = from_file(Pieces.of(data), {}, where="a parcel")
    first = sorted(tensors)[0]
    tensors[first] = tensors[first][..., :-1].clone()
    return bytes(to_file(tensors, metadata_of(data)))


def without_one(data: bytes, before: bytes) -> bytes:
    """A tensor is missing."""
    tensors = from_file(Pieces.of(data), {}, where="a parcel")
    del tensors[sorted(tensors)[0]]
    return bytes(to_file(tensors, metadata_of(data)))


def torn(data: bytes, before: bytes) -> bytes:
    """Its end is missing."""
    return data[:-8]


@pytest.mark.parametrize(
    ("payload", "change", "words"),
    [
        (Payload.PAIRS, repeated, "the pairs are of micro-batch '0', not '1'"),
        (Payload.WEIGHTS, repeated, "the adapters of a helper are of item '0', not '1'"),
        (Payload.PAIRS, cut, "the pair of .* is "),
        (Payload.PAIRS, without_one, "too much or too little"),
        (Payload.WEIGHTS, cut, "the adapters that helper z sent for the blocks"),
        (Payload.WEIGHTS, without_one, "the adapters that helper z sent for the blocks"),
        (Payload.PAIRS, torn, "the pairs"),
        (Payload.WEIGHTS, torn, "the adapters of a helper"),
    ],
)
@pytest.mark.sampled(4)
def test_parcels_that_are_not_what_they_should_be_end_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, payload: str, change: Any, words: str
) -> None:
    """Nothing of them is used, and the message is one line."""
    with pytest.raises(IntegrityError, match=words) as caught:
        run(folder, monkeypatch, payload, change)
    assert "\n" not in str(caught.value)


def test_weights_of_another_version_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right item, but the helper has counted its updates otherwise."""

    def older(data: bytes, before: bytes) -> bytes:
        tensors = from_file(Pieces.of(data), {}, where="a parcel")
        return bytes(to_file(tensors, {**metadata_of(data), "version": "0"}))

    with pytest.raises(IntegrityError, match="the adapters of a helper are of version '0', not '1'"):
        run(folder, monkeypatch, Payload.WEIGHTS, older)


def empty(data: bytes, before: bytes) -> bytes:
    """Nothing is in it."""
    return bytes(to_file({}, metadata_of(data)))


def not_finite(data: bytes, before: bytes) -> bytes:
    """One number of the first tensor is none."""
    tensors = from_file(Pieces.of(data), {}, where="a parcel")
    tensors[sorted(tensors)[0]].view(-1)[0] = float("nan")
    return bytes(to_file(tensors, metadata_of(data)))


def test_pairs_of_no_block_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that ships nothing for a block does not count as one whose gradient is zero."""
    with pytest.raises(IntegrityError, match="too little"):
        run(folder, monkeypatch, Payload.PAIRS, empty)


@pytest.mark.parametrize("payload", [Payload.PAIRS, Payload.WEIGHTS])
def test_numbers_that_are_not_finite_are_told_as_a_run_that_diverged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, payload: str
) -> None:
    """Nothing is damaged, so the exit code is that of a run without helpers, and step and remedy are named."""
    with pytest.raises(DivergedError, match=r"diverged at step 1, .* owner a: .*not finite.*learning_rate"):
        run(folder, monkeypatch, payload, not_finite)

"""What a node refuses of the pairs and weights that come: another item's, another version's, another shape's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.techniques.offload import runner
from edge.techniques.offload.pairs import from_file, to_file
from ringtune.errors import DivergedError, IntegrityError
from ringtune.schedule.actions import Payload, TensorKey
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import TensorFile
from tests.support.recorded_ring import RecordedRing
from tests.support.torch_ring import Case, make_carrier, write_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model and its rows."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, payload: str, change: Any, **of_case: Any) -> None:
    """Host a with helper z; what comes of a kind is changed: (bytes, bytes of the one before, node) -> bytes."""
    case = Case(folder=folder, method="all", num_steps=2, microbatches=2, every_steps=4, owners=("a",), **of_case)
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
    RecordedRing(
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


def longer(data: bytes, before: bytes) -> bytes:
    """Rows of nine times as many tokens, which agree with each other."""
    tensors = from_file(Pieces.of(data), {}, where="a parcel")
    many = {name: value.repeat_interleave(9, dim=1) for name, value in tensors.items()}
    return bytes(to_file(many, metadata_of(data)))


def torn(data: bytes, before: bytes) -> bytes:
    """Its end is missing."""
    return data[:-8]


def older(data: bytes, before: bytes) -> bytes:
    """The right item, but the helper has counted its updates otherwise."""
    tensors = from_file(Pieces.of(data), {}, where="a parcel")
    return bytes(to_file(tensors, {**metadata_of(data), "version": "0"}))


def empty(data: bytes, before: bytes) -> bytes:
    """Nothing is in it."""
    return bytes(to_file({}, metadata_of(data)))


def not_finite(data: bytes, before: bytes) -> bytes:
    """One number of the first tensor is none."""
    tensors = from_file(Pieces.of(data), {}, where="a parcel")
    tensors[sorted(tensors)[0]].view(-1)[0] = float("nan")
    return bytes(to_file(tensors, metadata_of(data)))


DIVERGED = r"diverged at step 1, .* owner a: .*not finite.*learning_rate"


@pytest.mark.parametrize(
    ("payload", "change", "words"),
    [
        (Payload.PAIRS, repeated, "the pairs are of micro-batch '0', not '1'"),
        (Payload.WEIGHTS, repeated, "the adapters of a helper are of item '0', not '1'"),
        (Payload.WEIGHTS, older, "the adapters of a helper are of version '0', not '1'"),
        (Payload.PAIRS, cut, "the pair of .* is "),
        (Payload.PAIRS, without_one, "too much or too little"),
        (Payload.PAIRS, longer, "the pairs of 4 rows have .* numbers, at most .* are taken"),
        (Payload.PAIRS, empty, "too little"),  # not one whose gradient is zero
        (Payload.WEIGHTS, cut, "the adapters that helper z sent for the blocks"),
        (Payload.WEIGHTS, without_one, "the adapters that helper z sent for the blocks"),
        (Payload.PAIRS, torn, "the pairs"),
        (Payload.WEIGHTS, torn, "the adapters of a helper"),
        (Payload.PAIRS, not_finite, DIVERGED),
        (Payload.WEIGHTS, not_finite, DIVERGED),
    ],
)
@pytest.mark.sampled(4)
def test_parcels_that_are_not_what_they_should_be_end_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, payload: str, change: Any, words: str
) -> None:
    """Nothing of them is used, and the message is one line.

    Of numbers that are not finite nothing is damaged: the exit code is that of a run without helpers that diverged.
    What is found only when it is used names its sender, too.
    """
    with pytest.raises(DivergedError if change is not_finite else IntegrityError, match=words) as caught:
        run(folder, monkeypatch, payload, change)
    assert "\n" not in str(caught.value)
    is_found_late = change in (cut, without_one, longer, empty)
    assert caught.value.peer == (("a" if payload == Payload.PAIRS else "z") if is_found_late else "")


def test_pairs_that_overflow_in_the_type_of_the_run_are_the_hosts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are finite in a wider type; the helper would report gradients of its own that are not."""

    def wide(data: bytes, before: bytes) -> bytes:
        tensors = from_file(Pieces.of(data), {}, where="a parcel")
        large = {name: torch.full_like(value, 1e300, dtype=torch.float64) for name, value in tensors.items()}
        return bytes(to_file(large, metadata_of(data)))

    with pytest.raises(DivergedError, match=r"the pairs have .* not finite") as caught:
        run(folder, monkeypatch, Payload.PAIRS, wide, dtype="float32")
    assert caught.value.peer == "a"


@pytest.mark.parametrize("payload", [Payload.PAIRS, Payload.WEIGHTS])
def test_parcel_that_is_not_finite_is_told_by_who_made_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, payload: str
) -> None:
    """It is not sent: its receiver would refuse it, and either of both could be wrong."""
    monkeypatch.setattr(runner, "to_file", lambda tensors, of: pytest.fail("it was packed"))
    spoiled = runner.OffloadRunner.take_parcel

    def take(offload: runner.OffloadRunner, key: TensorKey) -> Pieces:
        if key.payload == payload:
            next(iter(offload._shipped[key][0].values())).detach().view(-1)[0] = float("inf")
            return spoiled(offload, key)
        return Pieces.of(bytes(to_file(*offload._shipped.pop(key))))

    monkeypatch.setattr(runner.OffloadRunner, "take_parcel", take)
    with pytest.raises(DivergedError, match=DIVERGED) as caught:
        run(folder, monkeypatch, payload, repeated)
    assert caught.value.peer == ""

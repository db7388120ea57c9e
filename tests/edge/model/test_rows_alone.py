"""The numbers of a row depend on the row alone: not on padding, on its neighbours, or on where they lie."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from edge.data.tokens import IGNORED, Batch, load_tokenizer
from ringtune.models.families import DESCRIBED
from ringtune.models.family import (
    CAUSAL_LM,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
)
from tests.support.plain_rows import Ours, Plain
from tests.support.tiny_families import DECODERS, write_family

_PAD = 0
_ROWS: tuple[tuple[int, ...], ...] = (
    (17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27),
    (30,),
    (31, _PAD, 32, 33),
    (34, 35, _PAD),
    (_PAD, 36, 37),
    (_PAD, _PAD),
    (),
)
"""Long and short rows, rows with the padding id at the end, in the middle and alone, and one without a token."""
_PAIRS = [(name, task) for name, family in DESCRIBED.items() for task in family.tasks if task != IMAGE_CLASSIFICATION]


class _Alone(NamedTuple):
    """What eager transformers computed of one row, without padding, and the head of it.

    Attributes:
        logits: of the head: (C), (T, C), or of spans (T, 2).
        target: a class, a number, tags (T), first and last token, or the tokens themselves (T).
        loss: summed over the row's targets.
        counts: targets, and what else is counted, in the order of ``HeadCounts.more``.
    """

    logits: torch.Tensor
    target: torch.Tensor
    loss: float
    counts: tuple[float, ...]


def _alone(ours: Ours, plain: Plain, task: str, model_type: str, row: tuple[int, ...]) -> _Alone:
    """Compute one row alone; targets are made of its length."""
    batch = ours.batch([row])
    hidden, lm_loss = plain.row(batch, 0)
    reads_last = model_type in DECODERS and task in (CLASSIFICATION, REGRESSION)
    logits = ours.logits(hidden[None], {"cls_output": hidden[None, -1]} if reads_last else {})[0]
    places = torch.arange(len(row))
    cross_entropy = functools.partial(torch.nn.functional.cross_entropy, reduction="sum")
    if task == REGRESSION:
        error = float(logits[0]) - len(row) / 3
        return _Alone(logits, torch.tensor(len(row) / 3, dtype=torch.float64), error**2, (1, abs(error)))
    if task == QUESTION_ANSWERING:
        both = torch.tensor([len(row) // 2, len(row) - 1])
        return _Alone(logits, both, float(cross_entropy(logits.T, both)) / 2, (1,))
    if task == CAUSAL_LM:
        tokens = torch.tensor(row)
        hits = int((logits[:-1].argmax(-1) == tokens[1:]).sum())
        return _Alone(logits, tokens, lm_loss, (len(row) - 1, hits, len(row) - 1))
    if task == TAGGING:
        tags = torch.where(places % 3 == 1, IGNORED, places % 3)
        words = int((tags != IGNORED).sum())
        hits = int((logits.argmax(-1) == tags).sum())
        return _Alone(logits, tags, float(cross_entropy(logits, tags)), (words, hits, words))
    label = torch.tensor(len(row) % 3)
    return _Alone(logits, label, float(cross_entropy(logits, label)), (1, int(logits.argmax() == label)))


def _labels(batch: Batch, chosen: Sequence[_Alone | None], found: torch.Tensor) -> torch.Tensor:
    """Targets of a batch as its rows have them; a row without a token has none, or the number that was predicted."""
    first = next(row.target for row in chosen if row is not None)
    labels = torch.full((len(chosen), *first.shape), IGNORED, dtype=first.dtype)
    if first.dtype.is_floating_point:
        labels = found[:, 0].clone()
    elif first.dim() and found.shape[-1] != 2:
        labels = torch.full(batch.mask.shape, IGNORED)
    for place, row in enumerate(chosen):
        if row is not None:
            (labels[place] if not row.target.dim() else labels[place, : len(row.target)]).copy_(row.target)
    return labels


@pytest.mark.parametrize(("model_type", "task"), _PAIRS)
@pytest.mark.sampled(5)
def test_a_row_in_any_batch_is_the_row_alone(tmp_path: Path, model_type: str, task: str) -> None:
    """Logits, losses and counts in batches of every size, with tokenizers of both sides, are those of rows alone."""
    folder = write_family(tmp_path, model_type, num_blocks=2, with_decoder=task == CAUSAL_LM, padding_side="left")
    ours, plain = Ours(folder, task), Plain(folder, task)
    wanted = [_alone(ours, plain, task, model_type, row) if row else None for row in _ROWS]
    tokenizer, rng = load_tokenizer(folder), random.Random(0)
    for size in (len(_ROWS), 3, 2, 1):
        chosen = rng.sample(range(len(_ROWS)), size)
        tokenizer.padding_side = rng.choice(["left", "right"])
        if not any(_ROWS[index] for index in chosen):
            continue
        batch = ours.batch([_ROWS[index] for index in chosen], tokenizer=tokenizer)
        last, more = ours.last(batch)
        found = ours.logits(last, more)
        assert bool(torch.isfinite(found).all())
        alone = [wanted[index] for index in chosen]
        for place, row in enumerate(alone):
            if row is not None:
                got: Any = found[place] if found.dim() == 2 else found[place][: len(row.logits)]
                assert float((got - row.logits).norm()) < 1e-10 * max(1.0, float(row.logits.norm())), _ROWS[
                    chosen[place]
                ]
        counts = ours.counts(batch._replace(labels=_labels(batch, alone, found)), last, more)
        rows = [row for row in alone if row is not None]
        assert float(counts.loss_sum) == pytest.approx(sum(row.loss for row in rows), rel=1e-10)
        more_than_rows = len(alone) - len(rows) if task == REGRESSION else 0
        sums = [sum(values) for values in zip(*(row.counts for row in rows), strict=True)]
        assert [counts.num_targets - more_than_rows, *dict(counts.more).values()] == pytest.approx(sums, rel=1e-10)


@pytest.mark.parametrize("model_type", ["doge", "olmo", "bloom"])
def test_rows_of_one_length_are_those_beside_a_shorter_one(tmp_path: Path, model_type: str) -> None:
    """Without padding the library may leave a decoder's mask out; Doge's fused attention would then see the future."""
    ours = Ours(write_family(tmp_path, model_type, with_decoder=True), CAUSAL_LM)
    equal = ours.batch([_ROWS[0], _ROWS[0][::-1]])
    padded = ours.batch([_ROWS[0], _ROWS[0][::-1], _ROWS[1]])
    assert float((ours.last(equal)[0] - ours.last(padded)[0][:2]).abs().max()) < 1e-12


_PACKED = ((0, 2), (3, 1, 4), (5,))
"""Rows of each sequence; the last one is a row alone, with padding."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", DECODERS)
def test_a_row_packed_with_others_is_the_row_alone(tmp_path: Path, model_type: str, attention: str) -> None:
    """Hidden states and loss of rows of 1 to 11 tokens, longer and shorter than a window of five."""
    folder = write_family(tmp_path, model_type, num_blocks=2, with_decoder=True)
    ours, plain = Ours(folder, CAUSAL_LM), Plain(folder, CAUSAL_LM)
    if model_type != "gemma2":  # it has a cap, and always written-out attention
        ours.base.config._attn_implementation = attention
    parts = [[ours.batch([_ROWS[row]]) for row in rows] for rows in _PACKED]
    batch = ours.batch([[token for row in rows for token in _ROWS[row]] for rows in _PACKED])
    for place, rows in enumerate(parts):
        turns = [part.mask[0] * (1 + turn % 2) for turn, part in enumerate(rows)]
        batch.mask[place, : sum(map(len, turns))] = torch.cat(turns)
        batch.labels[place, torch.tensor([0, *map(len, turns)]).cumsum(0)[:-1]] = IGNORED
    last, _ = ours.last(batch)
    assert bool(torch.isfinite(last).all())
    for place, rows in enumerate(parts):
        wanted = [plain.row(part, 0) for part in rows]
        hidden = torch.cat([each for each, _ in wanted])
        assert float((last[place, : len(hidden)] - hidden).norm()) < 1e-10 * max(1.0, float(hidden.norm()))
        counts = ours.counts(batch.rows(place, place + 1), last[place : place + 1], {})
        assert float(counts.loss_sum) == pytest.approx(sum(value for _, value in wanted), rel=1e-10)

"""The numbers of a row depend on the row alone: not on padding, on its neighbours, or on where they lie."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from edge.data.tokens import load_tokenizer
from ringtune.models.families import FAMILIES
from ringtune.models.family import CAUSAL_LM, CLASSIFICATION, IMAGE_CLASSIFICATION, REGRESSION
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
_PAIRS = [(name, task) for name, family in FAMILIES.items() for task in family.tasks if task != IMAGE_CLASSIFICATION]


def _alone(ours: Ours, plain: Plain, task: str, model_type: str, row: tuple[int, ...]) -> torch.Tensor:
    """What the head says of a row that eager transformers computed alone, without padding."""
    batch = ours.batch([row])
    hidden = plain.row(batch, 0)[0][None]
    reads_last = model_type in DECODERS and task in (CLASSIFICATION, REGRESSION)
    return ours.logits(batch, hidden, {"cls_output": hidden[:, -1]} if reads_last else {})[0]


@pytest.mark.parametrize(("model_type", "task"), _PAIRS)
@pytest.mark.sampled(20)
def test_a_row_in_any_batch_is_the_row_alone(tmp_path: Path, model_type: str, task: str) -> None:
    """Logits of every row in batches of every size, with tokenizers of both sides, are those of the row alone."""
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
        found = ours.logits(batch, last, more)
        assert bool(torch.isfinite(found).all())
        for place, index in enumerate(chosen):
            if wanted[index] is not None:
                got: Any = found[place] if found.dim() == 2 else found[place][: len(_ROWS[index])]
                assert float((got - wanted[index]).norm()) < 1e-10 * max(1.0, float(wanted[index].norm())), _ROWS[index]

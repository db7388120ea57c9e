"""Choose the settings of a job by its rows and its model: how long a row, how many steps, when blocks unfreeze.

These are places to begin, not rules of a run: each stands in the job with its reason, and may be changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.looking.table import Column
from ringtune.jobs.split import hold_out
from ringtune.jobs.template import Chosen
from ringtune.models.family import CAUSAL_LM, IMAGE_CLASSIFICATION, QUESTION_ANSWERING

LENGTHS: Final = {"quick": 0.5, "normal": 1.0, "thorough": 2.5}
"""How long a run shall be -> times as many steps."""

_CHARACTERS_PER_TOKEN = 3.5
_SPECIAL_TOKENS = 3
_COVERED = 0.95
_LEAST_TOKENS, _MOST_TOKENS, _STEP_TOKENS = 32, 256, 16
_LONG_TOKENS = 160
_PASSES = 4.0
_LEAST_STEPS, _MOST_STEPS = 80, 600
_WIDE = 1024
_HELD_OUT = 0.1
_EVALUATIONS = 8
_LEAST_ROWS_TO_HOLD_OUT = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What the settings follow from.

    Attributes:
        task: what is learned.
        rows: to train on, before any is held out.
        texts: columns that become tokens; none of images and plain text.
        longest: tokens that the model takes at most.
        blocks: of the model.
        hidden: width of the model.
        has_eval: whether there is a file of rows to evaluate on.
    """

    task: str
    rows: int
    texts: Sequence[Column]
    longest: int
    blocks: int
    hidden: int
    has_eval: bool


def choose_settings(seen: Seen, length: str) -> dict[str, Chosen]:
    """Choose the values of a job's keys, each with its reason.

    Args:
        seen: rows and model.
        length: one of ``LENGTHS``.
    """
    found: dict[str, Chosen] = {}
    tokens = _max_length(seen)
    if seen.task != IMAGE_CLASSIFICATION:
        found["train.max_length"] = tokens
    batch = _batch_size(seen, int(str(tokens.value)))
    found["train.batch_size"] = batch
    size = int(str(batch.value))
    found["train.microbatches"] = Chosen(min(4, size), "")
    steps = _steps(seen, size, LENGTHS[length])
    holds_out = not seen.has_eval and seen.rows >= _LEAST_ROWS_TO_HOLD_OUT
    trained = len(hold_out(seen.rows, share=_HELD_OUT, seed=0)[0]) if holds_out else seen.rows
    found["train.max_steps"] = Chosen(steps, f"{steps * size / trained:.1f} epochs of {trained:,} rows")
    rate = 1e-3 if seen.hidden < _WIDE else 5e-4
    found["train.learning_rate"] = Chosen(rate, f"usual for adapters of a model of width {seen.hidden}")
    found["train.lr_schedule"] = Chosen("linear", "")
    every = max(1, steps // (2 * max(1, seen.blocks - 1)))
    found["unfreeze.every_steps"] = Chosen(every, f"all {seen.blocks} blocks train after half of the steps")
    if holds_out:
        found["data.held_out"] = Chosen(_HELD_OUT, "there is no file of rows to evaluate on")
    if seen.has_eval or "data.held_out" in found:
        between = max(10, steps // (10 * _EVALUATIONS) * 10)
        found["train.eval_every"] = Chosen(between, f"{steps // between} evaluations show whether it still learns")
        found["train.keep_best"] = Chosen(True, "the result is that of the evaluation with the lowest loss")
    return found


def _max_length(seen: Seen) -> Chosen:
    """Tokens that nearly all rows fit in, by their characters; a question's context is cut into windows instead."""
    most = min(seen.longest or _MOST_TOKENS, _MOST_TOKENS)
    if not seen.texts:
        return Chosen(min(most, 128), "")
    characters = sum(column.at_share(_COVERED) for column in seen.texts)
    tokens = math.ceil(characters / _CHARACTERS_PER_TOKEN) + _SPECIAL_TOKENS
    rounded = -(-tokens // _STEP_TOKENS) * _STEP_TOKENS
    value = min(max(rounded, _LEAST_TOKENS), most)
    share = f"{_COVERED:.0%} of the rows have at most {characters:,} characters, some {tokens:,} tokens"
    cut = {QUESTION_ANSWERING: "; longer contexts become windows"}.get(seen.task, "; the rest is cut")
    return Chosen(value, share + (cut if tokens > value else ""))


def _batch_size(seen: Seen, tokens: int) -> Chosen:
    usual = 8 if tokens > _LONG_TOKENS or seen.task == CAUSAL_LM else 16
    fitting = 1 << max(0, (seen.rows // 8).bit_length() - 1)
    return Chosen(min(usual, fitting), "few rows" if fitting < usual else "")


def _steps(seen: Seen, batch_size: int, times: float) -> int:
    """Steps for some epochs, of few rows more and of many fewer; in tens."""
    wanted = _PASSES * seen.rows / batch_size
    bounded = min(max(wanted, _LEAST_STEPS), _MOST_STEPS)
    return max(20, round(bounded * times / 10) * 10)

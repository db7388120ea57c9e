"""The learning rate as a pure function of the step, so that every node knows it without asking."""

from __future__ import annotations

import math

from ringtune.jobs.sections import Train


def learning_rate(train: Train, step: int, num_steps: int) -> float:
    """The learning rate of the update at ``step``.

    Args:
        train: peak, schedule and warm-up.
        step: optimizer steps done before this one.
        num_steps: of the whole run.

    Returns:
        ``step / warmup_steps`` of the peak during warm-up, so 0 at step 0; then the peak (constant), a
        straight line down to 0 at ``num_steps`` (linear), or half a cosine wave down to 0 (cosine).

    Source: transformers ``get_constant_schedule_with_warmup`` and its linear and cosine siblings.
    """
    if step < train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    if train.lr_schedule == "constant":
        return train.learning_rate
    span = max(1, num_steps - train.warmup_steps)
    progress = min(1.0, (step - train.warmup_steps) / span)
    if train.lr_schedule == "linear":
        return train.learning_rate * (1.0 - progress)
    return train.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))

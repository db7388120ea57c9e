"""What is said when training has diverged: a loss, a tensor or a weight is no finite number any more."""

from __future__ import annotations

from ringtune.errors import DivergedError
from ringtune.schedule.turns import Item, StepKind

LOWER_THE_RATE = "lower train.learning_rate and train anew"


def diverged(item: Item, what: str, *, wire_dtype: str = "float32") -> DivergedError:
    """Make the error for an item of which something is not finite.

    Example: the training diverged at step 13, a batch of owner a: the loss is nan; lower train.learning_rate ...

    Args:
        item: the item.
        what: what was found, with its value.
        wire_dtype: of the course; a float16 overflows where the training itself is well.
    """
    when = "at" if item.kind.has_update else "in the evaluation after"
    remedy = LOWER_THE_RATE
    if wire_dtype == "float16":
        remedy = f"take wire.dtype = 'bfloat16', as float16 overflows above 65,504, or {LOWER_THE_RATE}"
    number = item.step + item.kind.has_update
    return DivergedError(f"the training diverged {when} step {number}, a batch of owner {item.owner}: {what}; {remedy}")


def may_diverge(item: Item) -> bool:
    """Whether the item's numbers are of the training, not of a measurement."""
    return item.kind in (StepKind.TRAIN, StepKind.EVALUATE)

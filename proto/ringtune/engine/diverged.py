"""What is said when training has diverged: a loss, a tensor or a weight is no finite number any more."""

from __future__ import annotations

from ringtune.errors import DivergedError
from ringtune.schedule.turns import Item, StepKind

LOWER_THE_RATE = "lower train.learning_rate and train anew"


def diverged(item: Item, what: str) -> DivergedError:
    """Make the error for an item of which something is not finite.

    Example: the training diverged at step 13, a batch of owner a: the loss is nan; lower train.learning_rate ...

    Args:
        item: the item.
        what: what was found, with its value.
    """
    when = "at" if item.kind.has_update else "in the evaluation after"
    where = f"{when} step {item.step + item.kind.has_update}, a batch of owner {item.owner}"
    return DivergedError(f"the training diverged {where}: {what}; {LOWER_THE_RATE}")


def may_diverge(item: Item) -> bool:
    """Whether the item's numbers are of the training, not of a measurement."""
    return item.kind in (StepKind.TRAIN, StepKind.EVALUATE)

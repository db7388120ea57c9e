"""The techniques, a module each; ``base`` has their common form."""

from typing import Final

from ringtune.schedule.plan import Plan
from ringtune.techniques import (
    activation_cache,
    activation_checkpointing,
    audit,
    compute,
    frozen_weights,
    full_parameters,
    generation,
    initial_adapter,
    invertible_adapter,
    offload,
    operation_capacities,
    replicas,
)
from ringtune.techniques.base import DecisionLines, Technique, TurnRule

TECHNIQUES: Final[list[Technique]] = [
    activation_checkpointing.TECHNIQUE,
    full_parameters.TECHNIQUE,
    initial_adapter.TECHNIQUE,
    invertible_adapter.TECHNIQUE,
    operation_capacities.TECHNIQUE,
    compute.TECHNIQUE,
    frozen_weights.TECHNIQUE,
    offload.TECHNIQUE,
    replicas.TECHNIQUE,
    activation_cache.TECHNIQUE,
    audit.TECHNIQUE,
    generation.TECHNIQUE,
]
"""Every technique, in the order in which planner and driver ask them."""

DECISION_LINES: Final[dict[str, DecisionLines]] = {
    kind: lines for technique in TECHNIQUES for kind, lines in technique.decisions.items()
}
"""The texts of each kind of decision that a technique logs."""


def turn_rules(part: Plan, items_ahead: int) -> tuple[TurnRule, ...]:
    """Collect the rules of all techniques that a placement uses; see ``Technique.turn_rule``."""
    rules = (technique.turn_rule(part, items_ahead) for technique in TECHNIQUES)
    return tuple(rule for rule in rules if rule is not None)

"""Techniques of training on a node, a module or folder each; ``base`` has their interface to the executor."""

from typing import Final

from edge.techniques.activation_cache import ActivationCache
from edge.techniques.base import Build, NodeTechnique
from edge.techniques.micro_batches import MicroBatches
from ringtune.schedule.plan import Plan

TECHNIQUES: Final[dict[str, Build]] = {"activation_cache": ActivationCache.of}
"""Constructor of each technique, by its name in ``ringtune.techniques``."""


def build_techniques(plan: Plan, node: str, flows: MicroBatches) -> dict[str, NodeTechnique]:
    """Build the techniques of a placement, by name."""
    built = {name: build(plan, node, flows) for name, build in TECHNIQUES.items()}
    return {name: technique for name, technique in built.items() if technique is not None}

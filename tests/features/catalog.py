"""All features by what laws hold for them."""

from __future__ import annotations

from typing import Final

from tests.features.feature import Feature
from tests.features.full_parameters import HIFT
from tests.features.initial import INITIAL, INITIAL_IN_FLIGHT
from tests.features.memory import CACHE, COMPUTE, FROZEN, FROZEN_WAYS, GGUF_BASES, VELORA, VELORA_IN_FLIGHT
from tests.features.methods import EARLY_STOP, PIPEADAPTER, PLAIN, SCATTERED, UNFREEZING
from tests.features.models import MODELS
from tests.features.offload import (
    COMPUTE_HELPERS,
    COMPUTE_IN_ANY_TIMING,
    HELPED,
    OVERLAP_AND_INTERVAL,
    USERS,
    USERS_IN_ANY_TIMING,
    USERS_WITHOUT_BLOCKS,
)
from tests.features.operations import (
    CHOICES,
    COMPUTE_OPERATIONS,
    PRIVATE_TABLES,
    REPLICAS,
    SUBNETS,
    SUBNETS_IN_FLIGHT,
    TABLES,
)

IN_ORDER: Final[list[Feature]] = [
    *(*PLAIN, *UNFREEZING, *SCATTERED, *EARLY_STOP, *MODELS, *HIFT, *VELORA, *CACHE, *FROZEN, *GGUF_BASES, *COMPUTE),
    *(*TABLES, *SUBNETS, *CHOICES, *PRIVATE_TABLES, *REPLICAS, *HELPED, *USERS, *USERS_WITHOUT_BLOCKS, *INITIAL),
    *(*COMPUTE_OPERATIONS, *COMPUTE_HELPERS),
]
"""What one process trains whose steps follow one another."""
IN_FLIGHT: Final[list[Feature]] = [*PIPEADAPTER, *SUBNETS_IN_FLIGHT, *INITIAL_IN_FLIGHT]
"""What trains with several items in flight: the reference depends on the split."""
WITHOUT_REFERENCE: Final[list[Feature]] = [
    *(*FROZEN_WAYS, *VELORA_IN_FLIGHT, *OVERLAP_AND_INTERVAL, *USERS_IN_ANY_TIMING, *COMPUTE_IN_ANY_TIMING)
]
"""What is only compared with itself: other splits, timings, checkpoints, blocks that run again."""
ALL: Final[list[Feature]] = [*IN_ORDER, *IN_FLIGHT, *WITHOUT_REFERENCE]
COUNTS: Final = {"chat": 4, "packed": 4, "family": 4, "adapter": 2, "initial": 2}
"""Variants of a group in the gate, where it is not one."""

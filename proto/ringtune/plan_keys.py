"""The keys of a plan that ``ringtune what-if`` changes: a light module, because its help lists them at start."""

from __future__ import annotations

from typing import Final

PLAN_KEYS: Final = {
    "batch_size": int,
    "microbatches": int,
    "num_steps": int,
    "local_iterations": int,
    "every_steps": int,
    "eval_every": int,
    "checkpoint_every": int,
    "credits": int,
    "wire_dtype": str,
    "turns": str,
    "method": str,
    "activations": str,
    "offload": str,
    "users": str,
}
"""Keys of the plan that may be changed, with their types."""

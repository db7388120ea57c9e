"""Keys of a plan that ``ringtune what-if`` can change; a module without heavy imports, because the help lists them."""

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
"""Key -> type of its value."""

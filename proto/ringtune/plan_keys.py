"""Keys of a plan that ``ringtune what-if`` can change; a module without heavy imports, because the help lists them."""

from __future__ import annotations

from typing import Final

PLAN_KEYS: Final[dict[str, type[int] | type[str]]] = {
    **dict.fromkeys(("batch_size", "microbatches", "num_steps", "local_iterations"), int),
    **dict.fromkeys(("every_steps", "eval_every", "checkpoint_every", "credits"), int),
    **dict.fromkeys(("wire_dtype", "turns", "method", "activations", "offload", "users"), str),
}
"""Key -> type of its value."""

"""What ringtune 0.1 wrote."""

from __future__ import annotations

from typing import Any

SLICES = (("node-0", 0, 2), ("node-1", 2, 3), ("node-2", 3, 4))
# as version 0.1.0 wrote it, key for key
WRITTEN: dict[str, Any] = {
    "method": "ringada",
    "num_blocks": 4,
    "phases": [{"slices": [{"node": node, "start": start, "stop": stop} for node, start, stop in SLICES]}],
    "owners": [
        {"node": "node-0", "train_rows": 30, "eval_rows": 10},
        {"node": "node-1", "train_rows": 31, "eval_rows": 11},
    ],
    "num_steps": 18,
    "local_iterations": 3,
    "every_steps": 4,
    "batch_size": 8,
    "microbatches": 2,
    "max_length": 16,
    "hidden_size": 32,
    "eval_every": 9,
    "checkpoint_every": 6,
    "credits": 8,
    "wire_dtype": "float32",
    "private_blocks": 0,
    "labels": ["bad", "good"],
    "seed": 0,
    "unfreeze": "every",
    "unfreeze_at": [],
    "patience_steps": 20,
    "min_improvement": 0.01,
    "digest": "1cdf36df70af67ae8438d016056a1c0be4a2a9eb5faf459548e2332e8364b0df",
}

"""The demo's job, as the file that a user would write."""

from __future__ import annotations

import json
from pathlib import Path

JOB = """\
# Sentiment of film reviews: MiniLM with bottleneck adapters, RingAda's top-down unfreezing.
[model]
path = {model}
task = "sequence-classification"

[data]
train = {train}
eval = {held_out}
text = "text"
label = "label"

[adapter]
config = "seq_bn"

[train]
method = "ringada"
optimizer = "adamw"
learning_rate = 2e-3
lr_schedule = "linear"
batch_size = 16
microbatches = 4
max_length = 64
local_iterations = 10
max_steps = 320
seed = 0

[unfreeze]
every_steps = 20
"""


def write_job(path: Path, *, model: Path, train: Path, held_out: Path) -> None:
    """Write the demo's ``job.toml``; relative paths in it count from its own folder."""
    quoted = {name: json.dumps(str(value)) for name, value in (("model", model), ("train", train))}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(JOB.format(**quoted, held_out=json.dumps(str(held_out))), encoding="utf-8")

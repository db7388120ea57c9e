"""The whole model of a run in one process: base model, adapter and head, computed as the ring computes them.

B rows of a batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from edge.data.tokens import Batch, check_ids
from edge.model.heads import head_output, task_of
from edge.model.result.loading import load_saved
from edge.model.safetensors_files import SafetensorsFiles
from edge.model.skeleton import build_skeleton
from edge.model.slice import DTYPES, BlockRunner, materialise
from ringtune.jobs.job import Job
from ringtune.models.folder import model_dimensions, read_config


class WholeModel:
    """A model that has everything: embedding, all blocks and the head.

    Args:
        job: of the run.
        saved: folder of its adapter or model.
        labels: names of the classes; empty without.

    Attributes:
        longest: tokens that the model takes at most.

    Raises:
        ModelError: the base model is not there, or is another one.
        IntegrityError: what was saved is damaged, or of another model.
    """

    def __init__(self, job: Job, saved: Path, labels: Sequence[str]) -> None:
        folder, task, dtype = Path(job.model.path), task_of(job.model.task), DTYPES[job.model.dtype]
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with torch.random.fork_rng(devices=[]):
            skeleton = build_skeleton(folder, job)
            self._head = task.add(skeleton.model, tuple(labels))
        count = len(skeleton.blocks)
        with SafetensorsFiles(folder) as weights:
            materialise(skeleton, weights, blocks=range(count), with_embedding=True, dtype=dtype, device=self._device)
            task.connect(skeleton, self._head, weights)
        self._head.to(device=self._device, dtype=dtype).eval()
        load_saved(skeleton, job.model.task, saved, with_head=True)
        skeleton.model.eval()
        self._skeleton, self._blocks = skeleton, BlockRunner(skeleton, dropout=0.0, seed=job.train.seed)
        self.longest = model_dimensions(read_config(folder)).longest

    @torch.no_grad()
    def predict(self, batch: Batch) -> Any:
        """Compute what the head makes of a batch: its output with ``logits``, or of questions two of them, on the CPU.

        The numbers are those of an evaluation, which computes the same blocks in the same order.
        """
        batch = batch.to(self._device)
        return head_output(self._head, *self._last(batch))

    @torch.no_grad()
    def next_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Compute the logits (V) of the token after these, in float32 on the CPU."""
        ids_BT = torch.tensor([list(ids)], dtype=torch.int64, device=self._device)
        nothing = torch.full_like(ids_BT, -100)
        batch = Batch(ids=ids_BT, mask=torch.ones_like(ids_BT), token_type_ids=torch.zeros_like(ids_BT), labels=nothing)
        last_BTD, _, more = self._last(batch)
        logits_BTV = head_output(self._head, last_BTD[:, -1:], batch, more).logits
        cap = getattr(self._head, "logit_cap", 0.0)
        capped_BTV = cap * torch.tanh(logits_BTV / cap) if cap else logits_BTV
        found: torch.Tensor = capped_BTV[0, -1].float().cpu()
        return found

    def _last(self, batch: Batch) -> tuple[torch.Tensor, Batch, dict[str, Any]]:
        """Run embedding and blocks; return what the head is called with."""
        from adapters.context import ForwardContext

        base, family = self._skeleton.base, self._skeleton.family
        check_ids(batch, base)
        with ForwardContext(base, input_ids=batch.ids, attention_mask=batch.mask):
            hidden_BTD = family.embed(base, batch)
        context = self._blocks.context(hidden_BTD, batch.mask)
        hidden_BTD = self._blocks.run(hidden_BTD, batch.mask, context, 0, len(self._skeleton.blocks))
        last_BTD, more = family.finish(base, hidden_BTD, batch)
        return last_BTD, batch, more

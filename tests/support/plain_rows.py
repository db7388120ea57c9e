"""Rows computed by this tree in a batch, and each row alone by eager transformers, without padding.

B rows, T tokens, D model width.
"""

from __future__ import annotations

import functools
import types
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import transformers
from torch.overrides import TorchFunctionMode

from edge.data.tokens import IGNORED, Batch, Padder, TokenRow
from edge.model.heads import HeadCounts, task_of
from edge.model.skeleton import build_skeleton, no_initial_values
from edge.model.slice import BlockRunner, materialise
from edge.model.tensor_files import SafetensorsFiles
from ringtune.job.job import Adapter, Job, Model
from ringtune.models.family import CAUSAL_LM
from ringtune.models.folder import read_config

LENGTHS = (9, 1, 4)
P = ParamSpec("P")
R = TypeVar("R")


class Doubled(TorchFunctionMode):
    """Computes in float64 what models of float64 compute in float32: norms, softmax, rotary angles.

    Their rounding would be 1e-7 to 1e-5 of a row, as much as some mistakes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        doubled = {key: _doubled(value) for key, value in (kwargs or {}).items()}
        return func(*map(_doubled, args), **doubled)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _exact(method: Callable[P, R]) -> Callable[P, R]:
    """Compute without gradients, all of it in float64."""

    @functools.wraps(method)
    def exact(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad(), Doubled():
            return method(*args, **kwargs)

    return exact


class Ours:
    """A whole model as a ring computes it, with an adapter that has not trained, in float64."""

    def __init__(self, folder: Path, task: str, *, labels: Sequence[str] = ("a", "b", "c")) -> None:
        job = Job(model=Model(path=str(folder), task=task, dtype="float64"), adapter=Adapter(config="lora[r=2]"))
        self.task = task_of(task)
        self.config = read_config(folder)
        with torch.random.fork_rng(devices=[]):
            self._skeleton = build_skeleton(folder, job)
            self.head = self.task.add(self._skeleton.model, tuple(labels))
        count = len(self._skeleton.blocks)
        cpu = torch.device("cpu")
        with SafetensorsFiles(folder) as weights:
            materialise(
                self._skeleton, weights, blocks=range(count), with_embedding=True, dtype=torch.float64, device=cpu
            )
            self.task.connect(self._skeleton, self.head, weights)
        self.head.to(torch.float64).eval()
        self._skeleton.model.eval()
        self._blocks = BlockRunner(self._skeleton, dropout=0.0, seed=0)

    @property
    def base(self) -> Any:
        """The base model inside."""
        return self._skeleton.base

    def batch(self, rows: Sequence[Sequence[int]] = (), *, tokenizer: Any = None) -> Batch:
        """A batch of rows of tokens, as the data of a job is padded; without rows some of unlike lengths, or images."""
        draws = torch.Generator().manual_seed(0)
        if "num_channels" in self.config:
            size, channels = self.config["image_size"], self.config["num_channels"]
            tokens = (size // self.config["patch_size"]) ** 2 + 1
            pixels = torch.randn(len(LENGTHS), channels, size, size, generator=draws)
            nothing = torch.zeros(len(LENGTHS), 0, dtype=torch.int64)
            mask = torch.ones(len(LENGTHS), tokens, dtype=torch.int64)
            return Batch(ids=nothing, mask=mask, token_type_ids=nothing, labels=torch.tensor([0, 1, 2]), pixels=pixels)
        rows = rows or [torch.randint(5, 100, (length,), generator=draws).tolist() for length in LENGTHS]
        padder = Padder(tokenizer or types.SimpleNamespace(pad_token_id=0, eos_token_id=None, pad_token_type_id=0))
        ids, mask, kinds = padder.pad([TokenRow(array("i", row), array("i", [0] * len(row))) for row in rows])
        return Batch(ids=ids, mask=mask, token_type_ids=kinds, labels=torch.where(mask == 1, ids, IGNORED))

    @_exact
    def last(self, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
        """What the head is called with."""
        base, family = self._skeleton.base, self._skeleton.family
        hidden = family.embed(base, batch)
        context = self._blocks.context(hidden, batch.mask)
        hidden = self._blocks.run(hidden, batch.mask, context, 0, len(self._skeleton.blocks))
        return family.finish(base, hidden, batch)

    @_exact
    def logits(self, last: torch.Tensor, more: Mapping[str, Any]) -> torch.Tensor:
        """What the head gives: (B, C), (B, T, C), or of spans (B, T, 2)."""
        logits: torch.Tensor = self.head(last, **more)
        return logits

    @_exact
    def counts(self, batch: Batch, last: torch.Tensor, more: Mapping[str, Any]) -> HeadCounts:
        """Loss and counts of a batch, as training and evaluation sum them up."""
        return self.task.run(self.head, last, batch, more)

    @_exact
    def losses(self, batch: Batch) -> list[float]:
        """The summed loss of each row, computed in the batch; 0 for a head that is new."""
        last, _ = self.last(batch)
        if self.task is not task_of(CAUSAL_LM):
            return [0.0] * len(batch.mask)
        cut = [batch.rows(row, row + 1) for row in range(len(batch.mask))]
        return [float(self.counts(one, last[row : row + 1], {}).loss_sum) for row, one in enumerate(cut)]


class Plain:
    """The same folder in eager transformers, in float64."""

    def __init__(self, folder: Path, task: str) -> None:
        self._is_lm = task == CAUSAL_LM
        loader = transformers.AutoModelForCausalLM if self._is_lm else transformers.AutoModel
        self._model: Any = loader.from_pretrained(str(folder), attn_implementation="eager", dtype=torch.float32)
        self._model.double().eval()

    def read_config_again(self, folder: Path) -> None:
        """Build the model anew from ``config.json``, with the weights that it has."""
        weights = self._model.state_dict()
        config = transformers.AutoConfig.from_pretrained(str(folder), attn_implementation="eager")
        with no_initial_values():
            self._model = type(self._model)(config).double().eval()
        self._model.load_state_dict(weights)

    @_exact
    def row(self, batch: Batch, row: int) -> tuple[torch.Tensor, float]:
        """The last hidden state (T, D) of one row's tokens, alone, and its summed loss."""
        if batch.pixels is not None:
            return self._model(batch.pixels[row : row + 1].double())[0][0], 0.0
        ids = batch.ids[row : row + 1][:, batch.mask[row] == 1]
        base = getattr(self._model, "model", self._model.base_model) if self._is_lm else self._model
        hidden = base(input_ids=ids)[0][0]
        if not self._is_lm:
            return hidden, 0.0
        logits = self._model(input_ids=ids)[0][0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
        return hidden, float(loss)

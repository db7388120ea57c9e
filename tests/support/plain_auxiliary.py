"""Auxiliary models written down plainly: a delta beside each matrix, added by a forward hook.

Nothing of ``edge.model.auxiliary`` is used here. Initial values follow the rule of decision 0043: zeros, and of an
MLP's first layer what torch would draw, by a generator seeded by run, block and tensor.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from ringtune.job.job import Job
from ringtune.models.adapter_config import parse_adapter_config
from tests.support.tiny_families import PLUGGED

# letter or option -> where the matrix is, in the names of each family
MATRICES: dict[str, dict[str, str]] = {
    "bert": {"q": "query", "k": "key", "v": "value", "intermediate": "intermediate.dense", "output": "output.dense"},
    "distilbert": {"q": "q_lin", "k": "k_lin", "v": "v_lin", "intermediate": "ffn.lin1", "output": "ffn.lin2"},
    "gpt2": {"qkv": "attn.c_attn", "intermediate": "mlp.c_fc", "output": "mlp.c_proj"},
    "llama": {"q": "q_proj", "k": "k_proj", "v": "v_proj", "intermediate": "mlp.down_proj", "output": "mlp.up_proj"},
    "qwen2": {"q": "q_proj", "k": "k_proj", "v": "v_proj", "intermediate": "mlp.up_proj", "output": "mlp.down_proj"},
}
ALIKE = dict.fromkeys(("roberta", "xlm-roberta", "electra", "vit"), "bert") | {"mistral": "llama"}
ALIKE |= dict.fromkeys(PLUGGED, "qwen2")
WORDS = {"q": "query", "k": "key", "v": "value"}


def is_auxiliary(config: str) -> bool:
    """Whether a configuration has one of our own kinds."""
    return any(text.strip().startswith(("linear", "mlp")) for text in config.split("|"))


def others_of(config: str) -> str:
    """What else a configuration has."""
    return "|".join(text for text in config.split("|") if not is_auxiliary(text))


class PlainDelta(nn.Module):
    """Either ``x W^T`` or ``relu(x V^T + b) U^T + c``."""

    def __init__(self, inputs: int, outputs: int, hidden: int, draw: Any) -> None:
        super().__init__()
        if not hidden:
            self.weight = nn.Parameter(torch.zeros(outputs, inputs))
            return
        self.down, self.up = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)
        with torch.no_grad():
            self.down.weight.copy_(draw("down.weight", (hidden, inputs), inputs))
            self.down.bias.copy_(draw("down.bias", (hidden,), inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The delta."""
        if hasattr(self, "down"):
            return self.up(self.down(x).clamp(min=0))  # type: ignore[no-any-return]
        return x @ self.weight.T


def add_plain_auxiliary(model: Any, job: Job, name: str) -> None:
    """Put a delta beside each chosen matrix of each block; torch's generator is left alone."""
    state = torch.get_rng_state()
    for text in job.adapter.config.split("|"):
        if is_auxiliary(text):
            _add_part(model, job, name, *parse_adapter_config(text)[0])
    torch.set_rng_state(state)


def _add_part(model: Any, job: Job, name: str, kind: str, given: dict[str, Any]) -> None:
    hidden = given.get("hidden", 128) if kind == "mlp" else 0
    letters = given.get("attn_matrices", ["q", "v"]) if given.get("selfattn_lora", True) else []
    wanted = [*letters, *(word for word in ("intermediate", "output") if given.get(f"{word}_lora"))]
    family = model.config.model_type
    matrices = MATRICES[ALIKE.get(family, family)]
    for index, block in model.iter_layers():
        if index in given.get("leave_out", []):
            continue
        for word in wanted:
            path, matrix = _find(block, matrices.get(word) or matrices["qkv"], word)
            rows, columns = matrix.weight.T.shape if family == "gpt2" else matrix.weight.shape
            is_fused = word not in matrices
            place = f"{path}.{name}" + (f".{WORDS[word]}" if is_fused else "")
            delta = PlainDelta(columns, rows // 3 if is_fused else rows, hidden, _drawer(job.train.seed, index, place))
            if not is_fused:
                matrix.add_module(name, delta)
            else:
                if not hasattr(matrix, name):
                    matrix.add_module(name, nn.ModuleDict())
                getattr(matrix, name)[WORDS[word]] = delta
            path_in = f"{name}.{WORDS[word]}" if is_fused else name
            third = "qkv".index(word) if is_fused else 0
            adding = _adding(path_in, given.get("alpha", 1.0), third, 3 if is_fused else 1)
            matrix.register_forward_hook(adding, prepend=True)  # before a bottleneck that is plugged in


def _find(block: nn.Module, end: str, word: str) -> tuple[str, Any]:
    """The one module of a block at this place; BERT has another ``output.dense`` behind its attention."""
    found = [
        (path, module)
        for path, module in block.named_modules()
        if f".{path}".endswith(f".{end}") and not (word == "output" and path.startswith("attention"))
    ]
    assert len(found) == 1, (end, found)
    return found[0]


def _drawer(seed: int, index: int, place: str) -> Any:
    def draw(name: str, shape: tuple[int, ...], inputs: int) -> torch.Tensor:
        digest = hashlib.sha256(f"{seed}/auxiliary/{index}/{place}.{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))
        return torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)

    return draw


def _adding(delta: str, alpha: float, third: int, parts: int) -> Any:
    """The delta is looked up by its path, so that a copy of the matrix adds its own."""

    def add(matrix: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        chunks = list(output.chunk(parts, -1))
        chunks[third] = chunks[third] + alpha * matrix.get_submodule(delta)(args[0])
        return torch.cat(chunks, -1)

    return add

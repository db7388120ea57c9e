"""Folder of PEFT with a run's LoRA: its configuration, and the names and shapes of its tensors.

``ringtune.techniques.initial_adapter`` reads such a folder. For AdapterHub's matrix ``X``::

    X.loras.ringtune.lora_A  ->  base_model.model.X.lora_A.weight

Both compute W + alpha / r * B A. Where query, key and value are one matrix, AdapterHub has n pairs of rank r for n of
the three, PEFT one pair of rank n r: A is the A of all below one another, B has theirs on its diagonal, and zeros
elsewhere. So that alpha / r stays, alpha is n times as large too.

A head that equals one of transformers has that class's names, and is in ``modules_to_save``. Beside another head, which
PEFT has no class for, the tensors have the names of the base model, without prefix.

Source: PEFT 0.21, ``LoraConfig``, ``check_target_module_exists``, ``get_pattern_key``, ``set_peft_model_state_dict``
and the task types of ``peft_model``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from ringtune.errors import IntegrityError
from ringtune.models.adapter_config import parse_adapter_config
from ringtune.models.architecture_heads import architecture_head
from ringtune.models.families import FAMILIES
from ringtune.models.family import (
    CAUSAL_LM,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    MATRICES,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
    BlockLayout,
    Family,
    head_task,
)
from ringtune.models.result_files import ADAPTER_CONFIG_FILE
from ringtune.models.text_towers import class_prefix
from ringtune.storage.pieces import Pieces
from ringtune.storage.tensor_files import DTYPE_BYTES, TensorFile, TensorPieces, write_tensors

PEFT_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin")
"""Names of the file with the tensors; the second is pickled."""

HEAD_MODULES: Final = ("classifier", "score", "qa_outputs", "head")
"""Heads of the classes of transformers, of ModernBERT in two modules; in BERT also the pooler."""

_TASKS: Final[Mapping[str, tuple[str | None, str]]] = {
    CLASSIFICATION: ("SEQ_CLS", "AutoModelForSequenceClassification"),
    REGRESSION: ("SEQ_CLS", "AutoModelForSequenceClassification"),
    TAGGING: ("TOKEN_CLS", "AutoModelForTokenClassification"),
    QUESTION_ANSWERING: ("QUESTION_ANS", "AutoModelForQuestionAnswering"),
    IMAGE_CLASSIFICATION: (None, "AutoModelForImageClassification"),
    CAUSAL_LM: ("CAUSAL_LM", "AutoModelForCausalLM"),
}
_WITHOUT_HEAD: Final = ("FEATURE_EXTRACTION", "AutoModel")
_NAME: Final = re.compile(r"(?P<module>.+)\.loras\.ringtune\.lora_(?P<half>[AB])")
_LETTERS: Final = "qkv"
"""Order of the parts of a fused matrix."""


def peft_class(model_type: str, task: str) -> tuple[str | None, str]:
    """Return PEFT's task type and the class that loads the base model, ``AutoModel`` if none has the run's head."""
    return _TASKS[head_task(task)] if architecture_head(model_type, task) else _WITHOUT_HEAD


def peft_files(
    adapter: TensorFile,
    head: Mapping[str, TensorPieces],
    *,
    config: str,
    model_type: str,
    task: str,
    num_blocks: int,
    base_model: str,
    in_tower: bool = False,
) -> dict[str, Pieces]:
    """Make the files of a PEFT folder, by name; raises ``IntegrityError``.

    Args:
        adapter: of a run's result.
        head: tensors of the trained head in a run's result; left out where ``peft_class`` is ``AutoModel``.
        config: ``adapter.config``, which ``ringtune.models.adapter_support.peft_refusal`` accepts.
        model_type: of a family.
        task: ``model.task``.
        num_blocks: of the model.
        base_model: its id.
        in_tower: whether the base is a text tower, and the folder for the whole model, whose pictures' matrices have
            the same ends of names.
    """
    (part,) = parse_adapter_config(config)
    options = part.whole
    family, form = FAMILIES[model_type], architecture_head(model_type, task)
    prefix = class_prefix(model_type) if in_tower else family.prefix if form else ""
    parts = [letter for letter in _LETTERS if letter in options["attn_matrices"]]
    tensors, places = dict[str, TensorPieces](), list[_Place]()
    for name in adapter.infos:
        if (match := _NAME.fullmatch(name)) is None:
            raise IntegrityError(f"adapter.safetensors has {name}, which is no LoRA; copy the run's folder again")
        inside = match["module"].removeprefix(family.prefix)
        block, _, path = inside.removeprefix(family.block_prefix).partition(".")
        place, tensor = _Place(prefix + inside, int(block), path), adapter.tensor(name)
        if match["half"] == "B":
            places.append(place)
            if tensor.shape[1:] != (options["r"],):
                raise IntegrityError(
                    f"adapter.safetensors has {name} of shape {list(tensor.shape)}, adapter.config has rank "
                    f"{options['r']}; copy the run's folder again"
                )
            tensor = _on_diagonal(tensor, parts) if _is_fused(family.layout, path) else tensor
        tensors[f"base_model.model.{place.module}.lora_{match['half']}.weight"] = tensor
    described: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": peft_class(model_type, task)[0],
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": family.layout.inputs_first,
        "inference_mode": True,
        "lora_dropout": options.get("dropout", 0.0),
        "use_rslora": False,
        **_ranks(family.layout, {place.path for place in places}, options, len(parts)),
        **({"target_modules": sorted({place.module for place in places})} if in_tower else {}),
        **({} if in_tower else _targets(family, places, num_blocks)),
        "modules_to_save": None,
    }
    if form and head:
        head_tensors = {form.named(name): tensor for name, tensor in head.items()}
        tensors |= {f"base_model.model.{name}": tensor for name, tensor in head_tensors.items()}
        described["modules_to_save"] = sorted(
            {name.removeprefix(family.prefix).partition(".")[0] for name in head_tensors}
        )
    return {
        ADAPTER_CONFIG_FILE: Pieces.of((json.dumps(described, indent=2) + "\n").encode()),
        PEFT_FILES[0]: write_tensors(tensors, metadata={"format": "pt"}),
    }


class _Place(NamedTuple):
    """A matrix with LoRA: its name in the model, its block, and its path in the block."""

    module: str
    block: int
    path: str


def _is_fused(layout: BlockLayout, path: str) -> bool:
    return layout.is_merged and path == layout.query


def _ranks(layout: BlockLayout, paths: Collection[str], options: Mapping[str, Any], parts: int) -> dict[str, Any]:
    rank, alpha = options["r"], options["alpha"]
    fused = [path for path in paths if _is_fused(layout, path) and parts > 1]
    if not fused:
        return {"r": rank, "lora_alpha": alpha}
    if len(paths) == 1:
        return {"r": parts * rank, "lora_alpha": parts * alpha}
    more = {"rank_pattern": dict.fromkeys(fused, parts * rank), "alpha_pattern": dict.fromkeys(fused, parts * alpha)}
    return {"r": rank, "lora_alpha": alpha, **more}


def _targets(family: Family, places: Iterable[_Place], num_blocks: int) -> dict[str, Any]:
    """Name the matrices: by their ends where these are of no other matrix of a block, else each by its whole name.

    Example: ``q_proj`` and ``v_proj``; of BERT's ``output.dense`` whole names, as ``attention.output.dense`` ends so.
    """
    every = {path for matrix in MATRICES for path in family.layout.matrices_of(matrix)}
    ends = {_end(place.path, every) for place in places}
    if "" in ends:
        return {"target_modules": sorted({place.module for place in places})}
    blocks = sorted({place.block for place in places})
    some = {"layers_to_transform": blocks, "layers_pattern": family.blocks_path.rpartition(".")[2]}
    return {"target_modules": sorted(ends), **(some if len(blocks) < num_blocks else {})}


def _end(path: str, every: Iterable[str]) -> str:
    """Return the shortest end of a dotted path, from a dot on, that no other one has; empty if there is none."""
    words = path.split(".")
    others = [f".{other}" for other in every if other != path]
    ends = (".".join(words[first:]) for first in reversed(range(len(words))))
    return next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), "")


def _on_diagonal(tensor: TensorPieces, parts: list[str]) -> TensorPieces:
    """Place the B of the parts of a fused matrix, which are one below the other, on the diagonal.

    Shape (n D, r) for n parts of width D becomes (3 D, n r).
    """
    rows, rank = tensor.shape
    width, count, size = rows // len(parts), len(parts), rank * DTYPE_BYTES[tensor.dtype]

    def pieces() -> Iterator[bytes]:
        content = bytes(tensor.data)
        for letter in _LETTERS:
            if letter not in parts:
                yield bytes(width * count * size)
                continue
            at = parts.index(letter)
            for row in range(at * width, (at + 1) * width):
                yield bytes(at * size) + content[row * size : (row + 1) * size] + bytes((count - 1 - at) * size)

    whole = Pieces(len(_LETTERS) * width * count * size, pieces)
    return TensorPieces(tensor.dtype, (len(_LETTERS) * width, count * rank), whole)

"""Families of models, tasks, and what trains in a block: adapters of every kind, mixtures of them, own weights."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save_file

from ringtune.models.adapter_config import invertible_of
from ringtune.models.families import FAMILIES
from tests.features.feature import PRIVATE, SPLITS, Feature, Run, Tensors, inputs
from tests.support.stock_plugged import IN_EAGER, STOCK_CLASSES, with_room
from tests.support.tiny_families import DECODERS, MODEL_TYPES
from tests.support.torch_ring import TASKS, Case

# ---- how the library loads a result -------------------------------------------------------------------


def loaded_plainly(case: Case, folder: Path) -> Any:
    """The pretrained model with the result of a run, by the documented lines."""
    import adapters
    from transformers import AutoModelForCausalLM

    if (folder / "adapter.json").exists():
        return loaded_auxiliary(case, folder)
    if (folder / "adapter_interface.json").exists():
        return loaded_with_interface(case, folder)
    if case.task == "causal-lm" and not invertible_of(case.adapter):
        assert sorted(path.name for path in folder.iterdir()) == ["adapter.safetensors", "adapter_config.json"]
        plain = AutoModelForCausalLM.from_pretrained(str(case.folder / "model"))
        adapters.init(plain)
        plain.load_adapter(str(folder), use_safetensors=True, set_active=True)
        return plain
    plain = adapters.AutoAdapterModel.from_pretrained(str(case.folder / "model"))
    plain.load_adapter(str(folder), use_safetensors=True, set_active=True)
    assert plain.active_head == ("default" if case.task == "causal-lm" else "ringtune")
    return plain


def loaded_with_interface(case: Case, folder: Path) -> Any:
    """The pretrained model of a family that is plugged in with the result of a run, by the documented lines."""
    import adapters
    import transformers
    from adapters import AdapterModelInterface

    interface = AdapterModelInterface(**json.loads((folder / "adapter_interface.json").read_text())["interface"])
    name, base = STOCK_CLASSES.get(case.task, "AutoModelForCausalLM"), str(case.folder / "model")
    choice: dict[str, Any] = {}
    if case.task in ("sequence-classification", "regression"):
        name = "AutoModelForSequenceClassification"
    if case.task != "causal-lm":
        choice = {"num_labels": len(case.labels) or (2 if case.task == "question-answering" else 1)}
    if json.loads((case.folder / "model" / "config.json").read_text())["model_type"] in IN_EAGER:
        choice["attn_implementation"] = "eager"
    plain = getattr(transformers, name).from_pretrained(base, **choice)
    adapters.init(plain, interface=interface)
    plain.load_adapter(str(folder), use_safetensors=True, set_active=True)
    return with_room(plain)


def loaded_auxiliary(case: Case, folder: Path) -> Any:
    """The pretrained model with auxiliary models, by the documented lines."""
    from adapters import AutoAdapterModel
    from transformers import AutoModelForCausalLM

    from edge.model.auxiliary import load_auxiliary

    assert not (folder / "adapter_config.json").exists()
    if case.task == "causal-lm" and not invertible_of(case.adapter):
        return load_auxiliary(AutoModelForCausalLM.from_pretrained(str(case.folder / "model")), folder)
    plain = AutoAdapterModel.from_pretrained(str(case.folder / "model"))
    if case.task != "causal-lm":
        plain.load_head(str(folder), use_safetensors=True)
    return load_auxiliary(plain, folder)


def loaded_merged(case: Case, folder: Path) -> Any:
    """A whole model of transformers: the pretrained one with the result of a run merged into it."""
    import transformers

    from edge.model.merge import merged_files

    merged = folder.with_name("merged")
    merged.mkdir()
    for name, content in merged_files(case.job, case.folder / "model", folder, case.labels).items():
        (merged / name).write_bytes(bytes(content))
    architecture = json.loads((merged / "config.json").read_text())["architectures"][0]
    plain = getattr(transformers, architecture).from_pretrained(str(merged))
    assert not any("ringtune" in name for name, _ in plain.named_parameters())
    return plain


def loaded_own_weights(case: Case, folder: Path) -> Any:
    """The pretrained model with the own weights of its blocks, by the lines of docs/job.md."""
    tensors = load_file(folder / "blocks.safetensors")
    if case.task == "causal-lm":
        from transformers import AutoModelForCausalLM

        assert [path.name for path in folder.iterdir()] == ["blocks.safetensors"]
        is_capped = json.loads((case.folder / "model/config.json").read_text())["model_type"] in IN_EAGER
        choice = {"attn_implementation": "eager"} if is_capped else {}
        plain = AutoModelForCausalLM.from_pretrained(str(case.folder / "model"), **choice)
        plain = with_room(plain) if is_capped else plain
    else:
        from adapters import AutoAdapterModel

        plain = AutoAdapterModel.from_pretrained(str(case.folder / "model"))
        plain.load_head(str(folder), use_safetensors=True)
        tensors |= load_file(folder / "model_head.safetensors")  # once more, as the library makes a head in float32
    plain = plain.to(getattr(torch, case.dtype)).eval()
    assert not plain.load_state_dict(tensors, strict=False).unexpected_keys
    return plain


def write_result(run: Run, folder: Path) -> Path:
    """The folder of a run's result, whose parts are merged as the coordinator does."""
    folder.mkdir()
    merged: dict[str, Tensors] = {}
    for files in run.files.values():
        for name, content in files.items():
            if name in ("adapter.safetensors", "blocks.safetensors"):
                assert not merged.setdefault(name, {}).keys() & load(content).keys()
                merged[name] |= load(content)
            else:
                (folder / name).write_bytes(content)
    for name, tensors in merged.items():
        save_file(tensors, folder / name)
    return folder


# ---- families and tasks -------------------------------------------------------------------------------

PAIRS = [(name, task) for name in MODEL_TYPES for task in FAMILIES[name].tasks]


def of_family(name: str, model_type: str, task: str = "", config: Any = (), **changes: Any) -> dict[str, Any]:
    """Arguments of a ``Feature`` with the model of a family; of other families than BERT on one split."""
    task = task or TASKS[model_type]
    folder = functools.partial(inputs, model_type, task, **dict(config))
    found = {"name": name, "folder": folder, "changes": {"task": task, "num_steps": 4, "eval_every": 4, **changes}}
    split = Feature(name=name).split
    return found if model_type == "bert" else found | {"splits": {split: SPLITS[split]}}


def family(model_type: str, task: str, **changes: Any) -> Feature:
    """A family with a bottleneck, three micro-batches of unequal size."""
    values = {"microbatches": 3, "owners": ("a", "b"), **changes}
    return Feature(**of_family(f"family/{model_type}-{task}", model_type, task, **values), load=loaded_plainly)


FAMILY = [
    *(family(*pair) for pair in PAIRS),
    *(family(name, "sequence-classification", adapter="lora") for name in ("deberta-v2", "modernbert")),
]
FAMILY_DROPOUT = [
    Feature(
        **of_family(
            f"family-dropout/{model_type}-{task}", model_type, task, dropout=0.2, owners=("a",), checkpoint_every=0
        )
    )
    for model_type, task in PAIRS
]
FAMILY_PRIVATE = [
    Feature(
        **{
            **of_family(f"private-blocks/{name}", name, task, private_blocks=1, num_steps=6, owners=("a", "b")),
            "splits": PRIVATE,
        }
    )
    for name, task in (("llama", "causal-lm"), ("vit", "image-classification"))
]

CHAT = [
    Feature(**of_family(f"chat/{microbatches}-microbatches", "llama", "chat", max_length=64, microbatches=microbatches))
    for microbatches in (1, 2, 4, 8)
]
"""Rows of 3 and of 60 tokens in a batch: each token counts alike, whatever micro-batch and owner it is in."""

PACKED = [
    *(
        Feature(
            **of_family(f"packed/{model_type}", model_type, "causal-lm", packing=True, max_length=40, microbatches=3),
            bound=1e-6 if model_type == "gemma2" else 1e-9,
        )
        for model_type in DECODERS
    ),
    *(
        Feature(
            **of_family(
                f"packed/chat-{microbatches}-microbatches",
                "llama",
                "chat",
                packing=True,
                max_length=64,
                microbatches=microbatches,
            )
        )
        for microbatches in (1, 2, 4)
    ),
    Feature(
        **{
            **of_family(
                "packed/private-invertible",
                "llama",
                "causal-lm",
                packing=True,
                max_length=40,
                private_blocks=1,
                adapter="seq_bn_inv",
                num_steps=6,
            ),
            "splits": PRIVATE,
        }
    ),
]
"""The reference trains on each row of a sequence alone: of 2 to 16 tokens, and for chat of 3 and 60.

Attention with a cap computes its softmax in float32, and rounds a longer sum otherwise.
"""

# ---- adapters -----------------------------------------------------------------------------------------

CONFIGS = [
    "double_seq_bn",
    "par_bn",
    "scaled_par_bn[reduction_factor=4]",
    "seq_bn[use_gating=True,ln_before=True]",
    "seq_bn[scaling='channel']",
    "seq_bn[reduction_factor={'1': 8, 'default': 4}]",
    "seq_bn[leave_out=[1,2]]",
    "lora[r=4]",
    "lora[attn_matrices=['q','k','v'],intermediate_lora=True,output_lora=True]",
    "lora[use_gating=True]",
    "ia3",
    "dora",
    "mtl_lora",
    "loreft",
    "noreft",
    "loreft[layers=[1,3],suffix_positions=2]",
    "par_bn[reduction_factor=4]|lora[r=2]",
]
SOME = ["double_seq_bn", "scaled_par_bn[reduction_factor=4]", CONFIGS[8], "ia3", "loreft", CONFIGS[-1]]
AUXILIARY = [
    "linear[alpha=0.5]",
    "linear[attn_matrices=['q','k','v'],intermediate_lora=True,output_lora=True,alpha=2]",
    "mlp[hidden=8,alpha=0.5,leave_out=[1]]",
    "mlp[hidden=8,attn_matrices=['k'],intermediate_lora=True,output_lora=True,alpha=2]",
]
LINEAR_MLP = "linear[attn_matrices=['q'],alpha=2.0]|mlp[attn_matrices=['v'],hidden=8]"
LORA_LINEAR = "lora[r=4,attn_matrices=['q'],init_weights='bert']|linear[attn_matrices=['v'],alpha=0.5,output_lora=True]"
FUSED = (
    "linear[attn_matrices=['q']]|mlp[attn_matrices=['v'],hidden=8]|mlp[selfattn_lora=False,output_lora=True,hidden=4]"
)
BY_BLOCK = "seq_bn|linear[leave_out=[0]]|mlp[leave_out=[1,2,3],hidden=8]"
MIXTURES = [("bert", LINEAR_MLP), ("bert", LORA_LINEAR), ("gpt2", FUSED), ("gpt2", LORA_LINEAR), ("llama", BY_BLOCK)]
TASK_OF_ADAPTERS = {
    "bert": "sequence-classification",
    "gpt2": "causal-lm",
    "llama": "causal-lm",
    "vit": "image-classification",
}


def adapter(group: str, model_type: str, config: str, **changes: Any) -> Feature:
    """A short run; ReFT makes float32 tensors of its own, so the library can't run it in float64."""
    is_reft = "reft" in config
    task = TASK_OF_ADAPTERS.get(model_type, "question-answering")
    values = {"adapter": config, "dtype": "float32" if is_reft else "float64", **changes}
    words = "-".join([model_type, config, *changes])
    arguments = of_family(f"{group}/{words}", model_type, task, **values)
    return Feature(**arguments, bound=1e-6 if is_reft else 1e-9, load=loaded_plainly)


ADAPTER = [
    *(adapter("adapter", name, config) for name in ("bert", "llama") for config in CONFIGS),
    *(adapter("adapter", name, config) for name in ("gpt2", "vit") for config in SOME),
    *(adapter("adapter-auxiliary", name, config) for name in TASK_OF_ADAPTERS for config in AUXILIARY),
    *(adapter("adapter-auxiliary", "bert", config, dropout=0.2) for config in AUXILIARY[::2]),
    *(adapter("adapter-auxiliary", name, AUXILIARY[3], dropout=0.2) for name in ("roberta", "distilbert", "mistral")),
    *(adapter("adapter-auxiliary", name, AUXILIARY[1], dropout=0.2) for name in ("xlm-roberta", "electra")),
    *(adapter("adapter-mixture", name, config, dropout=0.2) for name, config in MIXTURES),
]

# ---- invertible adapters ------------------------------------------------------------------------------


def invertible(name: str, model_type: str = "bert", config: str = "seq_bn_inv", **changes: Any) -> Feature:
    """The embedding's adapter trains in the last three of six steps, of two owners in turns of one step."""
    values: dict[str, Any] = {"adapter": config, "num_steps": 6, "local_iterations": 1, "checkpoint_every": 4}
    values |= {"owners": ("a", "b"), **changes}
    return Feature(**of_family(f"invertible/{name}", model_type, **values), load=loaded_plainly)


INVERTIBLE = [
    *(
        invertible(name, name, microbatches=3)
        for name, family in FAMILIES.items()
        if not family.plugged and name != "vit"
    ),
    invertible("all", config="double_seq_bn_inv", method="all", microbatches=4),
    invertible("sgd-dropout", "gpt2", optimizer="sgd", dropout=0.2),
    invertible("with-linear", "gpt2", config="seq_bn_inv|linear[attn_matrices=['v']]"),
    invertible("union", config="lora[r=2]|par_bn[inv_adapter='nice',inv_adapter_reduction_factor=3]", turns="rows"),
    invertible("three-owners", "llama", owners=("a", "c", "b"), num_steps=12, local_iterations=1, eval_every=3),
]
INVERTIBLE_ON_SOME_RINGS = [
    dataclasses.replace(invertible("private-blocks", private_blocks=1), splits=PRIVATE),
    dataclasses.replace(
        invertible("single", method="single", owners=("a",), microbatches=2), splits={"one": (("a", 0, 4),)}
    ),
]

# ---- own weights --------------------------------------------------------------------------------------


def own_weights(name: str, model_type: str, **changes: Any) -> Feature:
    """The blocks' own weights train; no adapter is there."""
    values: dict[str, Any] = {"adapter": "full", "num_steps": 6, "owners": ("a", "b"), **changes}
    arguments = of_family(f"own-weights/{name}", model_type, **values)
    if changes.get("private_blocks"):
        arguments["splits"] = PRIVATE
    return Feature(**arguments, load=loaded_own_weights)


OWN_WEIGHTS = [
    *(own_weights(model_type, model_type) for model_type in MODEL_TYPES),
    own_weights("all-sgd", "bert", method="all", optimizer="sgd"),
    own_weights("dropout", "bert", dropout=0.2),
    own_weights("private", "bert", private_blocks=1),
    own_weights("private-gpt2", "gpt2", private_blocks=1),
    Feature(
        **of_family("own-weights/single", "bert", adapter="full", method="single", owners=("a",)),
        splits={"one": (("a", 0, 4),)},
        load=loaded_own_weights,
    ),
]
MODELS = [
    *FAMILY,
    *FAMILY_DROPOUT,
    *FAMILY_PRIVATE,
    *CHAT,
    *PACKED,
    *ADAPTER,
    *INVERTIBLE,
    *INVERTIBLE_ON_SOME_RINGS,
    *OWN_WEIGHTS,
]

"""Runs that begin from an adapter (``adapter.from``): of AdapterHub, of any values, with a head."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from coordinator.run.result_files import result_folder
from ringtune.job.job import result_of
from ringtune.models.family import CAUSAL_LM, CLASSIFICATION
from ringtune.schedule.course import FrozenWeights
from ringtune.storage.pieces import Pieces
from tests.features.feature import PRIVATE, Feature, inputs, on_one_node, planned, run_of
from tests.features.memory import ADAPTER_DOWN, EXACT, literally, rounded_once
from tests.features.methods import IN_FLIGHT, STALE_SPLITS, stale
from tests.features.models import LORA_LINEAR, loaded_plainly
from tests.features.offload import ON_THEIR_OWN, users, with_helpers
from tests.support.operation_masks import mixed_table
from tests.support.tiny_data import labels_of

NAME = "last-month"


@functools.cache
def folder_with_adapter(
    adapter: str, model_type: str = "", task: str = CLASSIFICATION, *, pickled: bool = False
) -> Path:
    """The inputs of a run, and in ``from.adapter`` an adapter with a head of random values, saved by the library."""
    import adapters

    plain = inputs(model_type, task if model_type else "")
    folder = plain.with_name(f"{plain.name}-from-{adapter.replace('|', '-')}-{pickled}")
    folder.mkdir()
    for path in plain.iterdir():
        (folder / path.name).symlink_to(path)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        model = adapters.AutoAdapterModel.from_pretrained(str(plain / "model"))
        model.add_adapter(NAME, config=adapter)
        if task == CLASSIFICATION:
            model.add_classification_head(NAME, num_labels=2, id2label=dict(enumerate(labels_of(CLASSIFICATION))))
        for name, value in model.named_parameters():
            if f".{NAME}." in name:
                value.normal_(std=0.2)
    model.save_adapter(
        str(folder / "from.adapter"), NAME, with_head=task == CLASSIFICATION, use_safetensors=not pickled
    )
    return folder


@functools.cache
def folder_of_run(adapter: str = "seq_bn", model_type: str = "") -> Path:
    """The inputs of a run, and in ``from.adapter`` the result of another one, as its folder has it."""
    plain = inputs(model_type, CLASSIFICATION if model_type else "")
    changes = {"num_steps": 2, "eval_every": 0, "adapter": adapter}
    first = Feature(name="first-run", changes=changes, folder=lambda: plain, load=lambda case, folder: None)
    folder = plain.with_name(f"{plain.name}-from-run-{adapter.replace('|', '-')}")
    (folder / "from.adapter").mkdir(parents=True)
    for path in plain.iterdir():
        (folder / path.name).symlink_to(path)
    sent = run_of(first, "two").files.items()
    files = {node: {name: Pieces.of(content) for name, content in own.items()} for node, own in sent}
    for name, content in result_folder(files, result_of(first.case.job)).items():
        (folder / "from.adapter" / name).write_bytes(bytes(content))
    return folder


def initial(name: str, adapter: str = "seq_bn", **arguments: Any) -> dict[str, Any]:
    """The arguments of a feature that begins from an adapter of the library."""
    changes = {"initial": True, "adapter": adapter, **arguments.pop("changes", {})}
    folder = functools.partial(folder_with_adapter, adapter, **arguments.pop("inputs", {}))
    return {"name": name, "changes": changes, "folder": folder, **arguments}


LORA = "lora[r=4,alpha=2]"
INITIAL = [
    Feature(**initial("initial/unfreezing")),
    Feature(**initial("initial/all", LORA, changes={"method": "all"}, inputs={"pickled": True})),
    Feature(**initial("initial/gpt2", "ia3", inputs={"model_type": "gpt2"})),
    Feature(**initial("initial/invertible", "double_seq_bn_inv", inputs={"model_type": "electra"})),
    Feature(
        **initial(
            "initial/invertible-of-a-decoder",
            "seq_bn_inv",
            changes={"task": CAUSAL_LM, "num_steps": 6},
            inputs={"model_type": "llama", "task": CAUSAL_LM},
            load=loaded_plainly,
        )
    ),
    *(
        Feature(
            name=f"initial/of-a-run-{model_type or adapter}",
            changes={"initial": True, "adapter": adapter},
            folder=functools.partial(folder_of_run, adapter, model_type),
        )
        for adapter, model_type in (("seq_bn", ""), (LORA_LINEAR, ""), ("seq_bn", "qwen2"))
    ),
    Feature(**initial("initial/private-blocks", splits=PRIVATE, changes={"private_blocks": 1, "owners": ("a", "b")})),
    with_helpers(**initial("-initial/whole", LORA), way="hosts-help-each-other"),
    with_helpers(**initial("-initial/merged", LORA), way="one-idle-helper", settings={"merged": True}),
    users(
        "-initial/alone",
        ON_THEIR_OWN,
        {},
        adapter=LORA,
        initial=True,
        folder=functools.partial(folder_with_adapter, LORA),
    ),
    Feature(
        **initial(
            "initial/velora", changes={"owners": ("a", "b")}, plan=planned(velora=ADAPTER_DOWN), reference=literally
        )
    ),
    Feature(
        **initial(
            "initial/frozen",
            LORA,
            changes={"frozen": FrozenWeights(dtype="bfloat16"), "dtype": "float32", "optimizer": "sgd"},
            reference=rounded_once,
            bound=EXACT,
        )
    ),
    Feature(
        **initial(
            "initial/operations",
            LORA,
            changes={
                "operations": mixed_table(7, ("a", "b"), 4),
                "microbatches": 4,
                "method": "all",
                "owners": ("a", "b"),
            },
            reference=on_one_node,
        )
    ),
]
INITIAL_IN_FLIGHT = [
    Feature(**initial("initial-in-flight/pipeadapter", changes=IN_FLIGHT, splits=STALE_SPLITS, reference=stale))
]

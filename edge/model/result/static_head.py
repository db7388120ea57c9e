"""Give a head of AdapterHub the form of the one that an architecture of transformers has itself.

A model with adapters by the plug-in interface has no other: ``load_adapter`` then takes the head with the adapters.

Source: adapters 1.3.0, ``PredictionHeadLoader`` for a model with a static head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from edge.model.heads import HEAD
from edge.model.result.own_heads import OwnHead

_PREFIX = f"heads.{HEAD}."


def as_static(
    tensors: Mapping[str, torch.Tensor], config: bytes, form: OwnHead
) -> tuple[dict[str, torch.Tensor], bytes]:
    """Return the tensors and ``head_config.json`` of a head as its architecture's own.

    Args:
        tensors: of AdapterHub's head, by name in the model.
        config: as AdapterHub writes it.
        form: the architecture, and the names of its layers.
    """
    described = json.loads(config)
    own = described.pop("config") or {}
    described |= {"config": None, "name": None, "model_class": form.architecture}
    described |= {name: own[name] for name in ("label2id", "num_labels") if name in own}
    return (
        {_named(name, form): value for name, value in tensors.items()},
        json.dumps(described, indent=2, sort_keys=True).encode(),
    )


def _named(name: str, form: OwnHead) -> str:
    layer, _, rest = name.removeprefix(_PREFIX).partition(".")
    return f"{form.layers[layer]}.{rest}" if layer in form.layers else name

"""A base model of transformers with a prediction head: AdapterHub's layers, initial values and names.

=====================  ====================  =================================================  ======================
``head_type``          reads                 layers                                             tensors
=====================  ====================  =================================================  ======================
classification         token 0, or the       two with tanh between; of a model without a        1.weight, 1.bias,
                       last of a decoder     class in AdapterHub that of its architecture       4.weight, 4.bias
image_classification   token 0               one                                                1.weight, 1.bias
tagging                each token            one                                                1.weight, 1.bias
question_answering     each token            one with two outputs: start and end                1.weight, 1.bias
causal_lm              each token            the decoder alone, without dropout                 0.weight
=====================  ====================  =================================================  ======================

Dropout is before each matrix, as in AdapterHub; a model without a class there has its architecture's: none before a
pooler, the single matrix ``score`` of a decoder, or the ends of an answer.

B batch rows, T tokens, D model width.

Source: adapters 1.3.0, ``heads/base.py``, ``heads/language_modeling.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import torch
from torch import nn

from ringtune.models.architecture_heads import ArchitectureHead, architecture_head
from ringtune.models.family import CAUSAL_LM, CLASSIFICATION, QUESTION_ANSWERING, TAGGING, Family

HEAD: Final = "ringtune"
LIBRARY_VERSION: Final = "adapters.1.3.0"
"""Folders are written as by this version of AdapterHub's library."""
_DROPOUT_KEYS: Final = ("classifier_dropout", "seq_classif_dropout", "hidden_dropout_prob", "resid_pdrop")
_OF_TOKEN: Final = ("classification", "image_classification")
_TASKS: Final = {"classification": CLASSIFICATION, "tagging": TAGGING, "question_answering": QUESTION_ANSWERING}


class Head(nn.Sequential):
    """A prediction head.

    Attributes:
        config: what AdapterHub writes of it to ``head_config.json``; of a decoder, which no file has, only its type.
        logit_cap: limit of a decoder's logits, which the loss applies; 0 = none.
    """

    def __init__(self, layers: Sequence[nn.Module], config: dict[str, Any], logit_cap: float = 0.0) -> None:
        super().__init__(*layers)
        self.config, self.logit_cap = config, logit_cap

    def get_output_embeddings(self) -> nn.Linear | None:
        """Return the decoder of a language model; None of another head."""
        first = self[0]
        return first if isinstance(first, nn.Linear) and self.config["head_type"] == "causal_lm" else None

    def forward(self, last_BTD: torch.Tensor, cls_output: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the logits of each row or token; ``cls_output`` (B, D) takes the place of token 0."""
        if self.config["head_type"] in _OF_TOKEN:
            last_BTD = last_BTD[:, 0] if cls_output is None else cls_output
        logits: torch.Tensor = super().forward(last_BTD)  # type: ignore[no-untyped-call]
        return logits


class ModelWithHead(nn.Module):
    """A base model and its head, with the names of AdapterHub's model of the family.

    Attributes:
        heads: empty, or the head under the name ``HEAD``.
    """

    def __init__(self, base: Any, family: Family) -> None:
        super().__init__()
        self.config, self.base_model_prefix = base.config, family.prefix.rstrip(".")
        setattr(self, self.base_model_prefix, base)
        self.heads = nn.ModuleDict()
        self._model_type, self._is_plugged = family.model_type, family.plugged
        self._has_score = family.plugged and CAUSAL_LM in family.tasks

    @property
    def base_model(self) -> Any:
        """The base model."""
        return getattr(self, self.base_model_prefix)

    @property
    def library_class(self) -> str:
        """Name of AdapterHub's class of this model; of the base model where it has none."""
        name = type(self.base_model).__name__
        return name if self._is_plugged else f"{name.removesuffix('Model')}AdapterModel"

    @property
    def head(self) -> Head:
        """The head; there is none before one is added."""
        head: Any = self.heads[HEAD]
        return cast(Head, head)

    def form_of(self, head_type: str) -> ArchitectureHead | None:
        """Return the form of a head in a class of transformers; None without one."""
        return architecture_head(self._model_type, _TASKS.get(head_type, ""))

    def get_input_embeddings(self) -> Any:
        """Return the token table."""
        return self.base_model.get_input_embeddings()

    def add_classes(self, head_type: str, labels: Sequence[str]) -> Head:
        """Add a new head with an output for each label.

        It draws from torch's generator as AdapterHub does: all matrices as torch makes them, then as the base model.
        """
        is_row, is_short = head_type == "classification", self._has_score or head_type != "classification"
        config: dict[str, Any] = {
            "head_type": head_type,
            "num_labels": len(labels),
            "layers": 1 if is_short else 2,
            "activation_function": "tanh",
            "label2id": {label: index for index, label in enumerate(labels)},
            "dropout_prob": None,
        }
        if head_type in _OF_TOKEN:
            config |= {"use_pooler": False, "bias": not (is_row and self._has_score)}
        if head_type == "image_classification":
            config["multilabel"] = False
        head = Head([*self._layers(config)], config)
        form = self.form_of(head_type)
        if form is None or not form.has_norm:  # ModernBERT's stay as torch makes them: transformers 5 draws others
            head.apply(self.base_model._init_weights)
        return self._with(head)

    def _layers(self, config: dict[str, Any]) -> Iterator[nn.Module]:
        width = self.config.hidden_size
        dropout = next((rate for key in _DROPOUT_KEYS if (rate := getattr(self.config, key, None)) is not None), 0.0)
        form = self.form_of(config["head_type"])
        drops_input, function = form is None or form.drops_input, nn.Tanh()
        if form is not None and form.activation:
            from transformers.activations import ACT2FN

            function = ACT2FN[getattr(self.config, form.activation)]
        if form is not None and form.has_norm:
            yield from (nn.Linear(width, width, bias=self.config.classifier_bias), function)
            yield nn.LayerNorm(width, eps=self.config.norm_eps, bias=self.config.norm_bias)
        elif config["layers"] > 1:
            yield from (nn.Dropout(dropout) if drops_input else nn.Identity(), nn.Linear(width, width), function)
            drops_input = True
        yield nn.Dropout(dropout) if drops_input else nn.Identity()
        yield nn.Linear(width, config["num_labels"], bias=config.get("bias", True))

    def add_decoder(self, *, bias: bool) -> Head:
        """Add a language model's decoder; its values are to be set."""
        decoder = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=bias)
        cap = getattr(self.config, "final_logit_softcapping", None) or 0.0
        return self._with(Head([decoder], {"head_type": "causal_lm"}, cap))

    def _with(self, head: Head) -> Head:
        self.heads[HEAD] = head.train(self.training)
        return head


def head_config(model: ModelWithHead) -> bytes:
    """Return ``head_config.json`` of a model's head, byte for byte as AdapterHub writes it."""
    described = {
        "config": model.head.config,
        "hidden_size": model.config.hidden_size,
        "model_class": model.library_class,
        "model_name": model.config.name_or_path,
        "model_type": model.config.model_type,
        "name": HEAD,
        "version": LIBRARY_VERSION,
    }
    return json.dumps(described, indent=2, sort_keys=True).encode()

"""Models without a class in AdapterHub: a base model of transformers with adapters by the plug-in interface.

The base model gets AdapterHub's flexible heads, as the library's own classes have them. They are those of the
architecture's own classes, so that ``AutoModelForSequenceClassification`` loads the result: of a decoder one matrix
without bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ringtune.models.architecture_heads import architecture_head
from ringtune.models.decoders import interface_of
from ringtune.models.family import CAUSAL_LM, CLASSIFICATION, QUESTION_ANSWERING, TAGGING, Family


def plug_in(model: Any, family: Family) -> None:
    """Prepare a model of transformers for adapters, by its family's interface if it has one."""
    import adapters

    adapters.init(model, interface=adapter_interface(family) if family.plugged else None)


def adapter_interface(family: Family) -> Any:
    """Make AdapterHub's interface of a plugged-in family."""
    from adapters import AdapterModelInterface

    return AdapterModelInterface(**interface_of(family))


def plugged_model(config: Any, family: Family) -> Any:
    """Build a model of a plugged-in family, with flexible heads, from a configuration of transformers.

    Fused attention ignores a cap on the scores, so a model with a cap gets eager attention.
    """
    from transformers import AutoModel

    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"
    if config.model_type == "modernbert":  # a compiled part, and a kernel without padding, compute the same
        config.reference_compile, config._attn_implementation = False, "sdpa"
    base_class = type(config)
    return _model_class(AutoModel._model_mapping[base_class], family)(config)


def _model_class(base_class: Any, family: Family) -> Any:
    """Make the class of a base model with heads, with the base model's name."""
    from adapters.heads import (
        ClassificationHead,
        ModelWithFlexibleHeadsAdaptersMixin,
        QuestionAnsweringHead,
        TaggingHead,
    )
    from adapters.model_mixin import EmbeddingAdaptersWrapperMixin

    prefix = family.prefix.rstrip(".")

    def init(self: Any, config: Any) -> None:
        super(made, self).__init__(config)
        base = base_class(config)
        setattr(self, prefix, base)
        plug_in(base, family)
        self._init_head_modules()

    def add_classification_head(self: Any, name: str, num_labels: int, id2label: Mapping[int, str]) -> None:
        if CAUSAL_LM not in family.tasks:
            add(self, CLASSIFICATION, ClassificationHead, name, num_labels=num_labels, id2label=dict(id2label))
            return
        head = ClassificationHead(self, name, num_labels, layers=1, id2label=dict(id2label), bias=False)
        self.add_prediction_head(head)

    def add_tagging_head(self: Any, name: str, num_labels: int, id2label: Mapping[int, str]) -> None:
        add(self, TAGGING, TaggingHead, name, num_labels=num_labels, id2label=dict(id2label))

    def add_qa_head(self: Any, name: str) -> None:
        add(self, QUESTION_ANSWERING, QuestionAnsweringHead, name)

    def add(self: Any, task: str, kind: Any, name: str, **options: Any) -> None:
        form = architecture_head(family.model_type, task)
        with torch.random.fork_rng(devices=[]):
            head = kind(self, name, **options)
        layers = head_layers(form, self.config, head.config["num_labels"])
        head._modules = {str(index): layer for index, layer in enumerate(layers)}
        head.apply(self._init_weights)
        self.add_prediction_head(head)

    bases = (EmbeddingAdaptersWrapperMixin, ModelWithFlexibleHeadsAdaptersMixin, *base_class.__bases__)
    made: Any = type(
        base_class.__name__,
        bases,
        {
            "__init__": init,
            "add_classification_head": add_classification_head,
            "add_tagging_head": add_tagging_head,
            "add_qa_head": add_qa_head,
            "base_model_prefix": prefix,
            "head_types": ["classification", "causal_lm", "tagging", "question_answering"],
        },
    )
    return made


def head_layers(form: Any, config: Any, outputs: int) -> Iterator[nn.Module]:
    """Make the layers of an encoder's head, with a dropout before each matrix."""
    from transformers.activations import ACT2FN

    width = config.hidden_size
    dropout = next(getattr(config, key) for key in _DROPOUT if getattr(config, key, None) is not None)
    function = ACT2FN[getattr(config, form.activation)] if form.activation else nn.Tanh()
    if form.has_norm:
        yield from (nn.Linear(width, width, bias=config.classifier_bias), function)
        yield nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)
    elif len(form.layers) > 1:
        yield from (nn.Dropout(dropout), nn.Linear(width, width), function)
    yield from (nn.Dropout(dropout), nn.Linear(width, outputs))


_DROPOUT = ("classifier_dropout", "hidden_dropout_prob")

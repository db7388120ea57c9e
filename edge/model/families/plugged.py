"""Models without a class in AdapterHub: a base model of transformers with adapters by the plug-in interface.

The base model gets AdapterHub's flexible heads, as the library's own classes have them. The classification head is the
architecture's own, one matrix without bias, so that ``AutoModelForSequenceClassification`` loads the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringtune.models.decoders import interface_of
from ringtune.models.family import Family


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
    base_class = type(config)
    return _model_class(AutoModel._model_mapping[base_class], family)(config)


def _model_class(base_class: Any, family: Family) -> Any:
    """Make the class of a base model with heads, with the base model's name."""
    from adapters.heads import ClassificationHead, ModelWithFlexibleHeadsAdaptersMixin
    from adapters.model_mixin import EmbeddingAdaptersWrapperMixin

    prefix = family.prefix.rstrip(".")

    def init(self: Any, config: Any) -> None:
        super(made, self).__init__(config)
        base = base_class(config)
        setattr(self, prefix, base)
        plug_in(base, family)
        self._init_head_modules()

    def add_classification_head(self: Any, name: str, num_labels: int, id2label: Mapping[int, str]) -> None:
        head = ClassificationHead(self, name, num_labels, layers=1, id2label=dict(id2label), bias=False)
        self.add_prediction_head(head)

    bases = (EmbeddingAdaptersWrapperMixin, ModelWithFlexibleHeadsAdaptersMixin, *base_class.__bases__)
    made: Any = type(
        base_class.__name__,
        bases,
        {
            "__init__": init,
            "add_classification_head": add_classification_head,
            "base_model_prefix": prefix,
            "head_types": ["classification", "causal_lm"],
        },
    )
    return made

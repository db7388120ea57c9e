"""Heads that equal the head of a transformers architecture, and the names of their tensors there.

AdapterHub's default head for classes is two layers with tanh between them, where BERT has its pooler and RoBERTa its
``classifier``. In transformers ELECTRA and DistilBERT have another activation there, GPT-2 and Llama a single layer. A
plugged-in model has only the architecture's head.

Source: transformers 4.57, the ``For...`` classes; adapters 1.3.0, ``head_utils.STATIC_TO_FLEX_HEAD_MAP``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from ringtune.models.family import (
    CAUSAL_LM,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
    head_task,
)
from ringtune.models.generic_decoders import GENERIC

HEAD_PREFIX: Final = "heads.ringtune."
"""Of the tensors of AdapterHub's head in a run's result."""


class ArchitectureHead(NamedTuple):
    """A head under an architecture's own names.

    Attributes:
        layers: layer of the head -> its name in that class; empty if the names are equal.
        activation: key of the config with the function between two matrices; empty: tanh.
        has_norm: whether a norm is behind the function.
        drops_input: whether dropout is before the first matrix, too; it is before the second one of two.
    """

    architecture: str
    layers: Mapping[str, str]
    activation: str = ""
    has_norm: bool = False
    drops_input: bool = True

    def named(self, name: str) -> str:
        """Return the architecture's name of a tensor, which may have it already.

        Example: ``bert.pooler.dense.weight`` for ``heads.ringtune.1.weight``.
        """
        layer, _, rest = name.removeprefix(HEAD_PREFIX).partition(".")
        return f"{self.layers[layer]}.{rest}" if layer in self.layers else name

    def library_name(self, name: str) -> str:
        """Return AdapterHub's name of a tensor; the inverse of ``named``."""
        layers = (layer for layer, own_name in self.layers.items() if name.startswith(f"{own_name}."))
        layer = next(layers, "")
        return f"{HEAD_PREFIX}{layer}{name.removeprefix(self.layers[layer])}" if layer else name


_ROBERTA = {"1": "classifier.dense", "4": "classifier.out_proj"}
_DEBERTA = {"1": "pooler.dense", "4": "classifier"}
_SCORE = {"1": "score"}
_ENCODER = {TAGGING: {"1": "classifier"}, QUESTION_ANSWERING: {"1": "qa_outputs"}}
_DECODER: Mapping[str, Mapping[str, str]] = {CLASSIFICATION: _SCORE, CAUSAL_LM: {}}
_NORMED = {"0": "head.dense", "2": "head.norm", "4": "classifier"}
_FORMS: Final = {
    CLASSIFICATION: "ForSequenceClassification",
    TAGGING: "ForTokenClassification",
    QUESTION_ANSWERING: "ForQuestionAnswering",
    IMAGE_CLASSIFICATION: "ForImageClassification",
    CAUSAL_LM: "ForCausalLM",
}
# model_type -> prefix of its classes, and the layers of each head
_CLASSES: Final[Mapping[str, tuple[str, Mapping[str, Mapping[str, str]]]]] = {
    "bert": ("Bert", {CLASSIFICATION: {"1": "bert.pooler.dense", "4": "classifier"}, **_ENCODER}),
    "roberta": ("Roberta", {CLASSIFICATION: _ROBERTA, **_ENCODER}),
    "xlm-roberta": ("XLMRoberta", {CLASSIFICATION: _ROBERTA, **_ENCODER}),
    "electra": ("Electra", _ENCODER),
    "distilbert": ("DistilBert", _ENCODER),
    "vit": ("ViT", {IMAGE_CLASSIFICATION: {"1": "classifier"}}),
    "gpt2": ("GPT2", _ENCODER),
    "llama": ("Llama", {TAGGING: _SCORE, CAUSAL_LM: {}}),
    "mistral": ("Mistral", {TAGGING: _SCORE, CAUSAL_LM: {}}),
    "qwen2": ("Qwen2", _DECODER),
    "qwen3": ("Qwen3", _DECODER),
    "gemma": ("Gemma", _DECODER),
    "gemma2": ("Gemma2", _DECODER),
    "gemma3_text": ("Gemma3Text", {CLASSIFICATION: _SCORE}),
    "smollm3": ("SmolLM3", _DECODER),
    "albert": ("Albert", {CLASSIFICATION: {"1": "albert.pooler", "4": "classifier"}, **_ENCODER}),
    "camembert": ("Camembert", {CLASSIFICATION: _ROBERTA, **_ENCODER}),
    "data2vec-text": ("Data2VecText", {CLASSIFICATION: _ROBERTA, **_ENCODER}),
    "deberta": ("Deberta", {CLASSIFICATION: _DEBERTA, **_ENCODER}),
    "deberta-v2": ("DebertaV2", {CLASSIFICATION: _DEBERTA, **_ENCODER}),
    "ernie": ("Ernie", {CLASSIFICATION: {"1": "ernie.pooler.dense", "4": "classifier"}, **_ENCODER}),
    "megatron-bert": ("MegatronBert", {CLASSIFICATION: {"1": "bert.pooler.dense", "4": "classifier"}, **_ENCODER}),
    "modernbert": ("ModernBert", dict.fromkeys((CLASSIFICATION, *_ENCODER), _NORMED)),
    "mpnet": ("MPNet", {CLASSIFICATION: _ROBERTA, **_ENCODER}),
    "xlm-roberta-xl": ("XLMRobertaXL", {CLASSIFICATION: _ROBERTA, **_ENCODER}),
}
# model_type -> key of the config with the function between two matrices
_ACTIVATIONS: Final = {
    **dict.fromkeys(("deberta", "deberta-v2"), "pooler_hidden_act"),
    "modernbert": "classifier_activation",
}
_LIBRARY: Final = ("bert", "roberta", "xlm-roberta", "electra", "distilbert", "vit", "gpt2", "llama", "mistral")
"""``model_type`` of classes of AdapterHub, whose heads have dropout before each matrix."""


def _drops_input(model_type: str, task: str, layers: Mapping[str, str]) -> bool:
    """Whether dropout is before the first matrix: not before a pooler, a single ``score``, or the ends of an answer."""
    if model_type in _LIBRARY or task == TAGGING or layers is _NORMED:
        return True
    return task == CLASSIFICATION and (layers is _ROBERTA or layers is _DEBERTA)


_OWN: Final = {
    (name, task): ArchitectureHead(
        prefix + _FORMS[task],
        layers,
        activation=_ACTIVATIONS.get(name, "") if len(layers) > 1 else "",
        has_norm=layers is _NORMED,
        drops_input=_drops_input(name, task, layers),
    )
    for name, (prefix, heads) in _CLASSES.items()
    for task, layers in heads.items()
} | {
    ("gpt2", CAUSAL_LM): ArchitectureHead("GPT2LMHeadModel", {}),
    ("gemma3_text", CAUSAL_LM): ArchitectureHead("Gemma3ForCausalLM", {}),
    **{(family.model_type, CAUSAL_LM): ArchitectureHead(family.architecture, {}) for family in GENERIC},
}


def architecture_head(model_type: str, task: str) -> ArchitectureHead | None:
    """Return the architecture's form of a task's head; None if it has no equal head."""
    form = head_task(task)
    return _OWN.get((model_type, CLASSIFICATION if form == REGRESSION else form))  # with one output

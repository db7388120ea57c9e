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
        has_norm: whether a norm is behind the function, and no dropout before the first matrix.
    """

    architecture: str
    layers: Mapping[str, str]
    activation: str = ""
    has_norm: bool = False

    def named(self, name: str) -> str:
        """Return the architecture's name of a tensor, which may have it already.

        Example: ``bert.pooler.dense.weight`` for ``heads.ringtune.1.weight``.
        """
        layer, _, rest = name.removeprefix(HEAD_PREFIX).partition(".")
        return f"{self.layers[layer]}.{rest}" if layer in self.layers else name

    def library_name(self, name: str) -> str:
        """Return AdapterHub's name of a tensor; the inverse of ``named``."""
        layers = (layer for layer, own in self.layers.items() if name.startswith(f"{own}."))
        layer = next(layers, "")
        return f"{HEAD_PREFIX}{layer}{name.removeprefix(self.layers[layer])}" if layer else name


_ROBERTA = {"1": "classifier.dense", "4": "classifier.out_proj"}
_SPANS = {"1": "qa_outputs"}
_SCORE = {"1": "score"}
_TAGS = {"1": "classifier"}

_OWN: dict[tuple[str, str], ArchitectureHead] = {
    ("bert", CLASSIFICATION): ArchitectureHead(
        "BertForSequenceClassification", {"1": "bert.pooler.dense", "4": "classifier"}
    ),
    ("roberta", CLASSIFICATION): ArchitectureHead("RobertaForSequenceClassification", _ROBERTA),
    ("xlm-roberta", CLASSIFICATION): ArchitectureHead("XLMRobertaForSequenceClassification", _ROBERTA),
    ("bert", TAGGING): ArchitectureHead("BertForTokenClassification", _TAGS),
    ("roberta", TAGGING): ArchitectureHead("RobertaForTokenClassification", _TAGS),
    ("xlm-roberta", TAGGING): ArchitectureHead("XLMRobertaForTokenClassification", _TAGS),
    ("electra", TAGGING): ArchitectureHead("ElectraForTokenClassification", _TAGS),
    ("distilbert", TAGGING): ArchitectureHead("DistilBertForTokenClassification", _TAGS),
    ("gpt2", TAGGING): ArchitectureHead("GPT2ForTokenClassification", _TAGS),
    ("llama", TAGGING): ArchitectureHead("LlamaForTokenClassification", _SCORE),
    ("mistral", TAGGING): ArchitectureHead("MistralForTokenClassification", _SCORE),
    ("bert", QUESTION_ANSWERING): ArchitectureHead("BertForQuestionAnswering", _SPANS),
    ("roberta", QUESTION_ANSWERING): ArchitectureHead("RobertaForQuestionAnswering", _SPANS),
    ("xlm-roberta", QUESTION_ANSWERING): ArchitectureHead("XLMRobertaForQuestionAnswering", _SPANS),
    ("electra", QUESTION_ANSWERING): ArchitectureHead("ElectraForQuestionAnswering", _SPANS),
    ("distilbert", QUESTION_ANSWERING): ArchitectureHead("DistilBertForQuestionAnswering", _SPANS),
    ("gpt2", QUESTION_ANSWERING): ArchitectureHead("GPT2ForQuestionAnswering", _SPANS),
    ("vit", IMAGE_CLASSIFICATION): ArchitectureHead("ViTForImageClassification", {"1": "classifier"}),
    ("gpt2", CAUSAL_LM): ArchitectureHead("GPT2LMHeadModel", {}),
    ("llama", CAUSAL_LM): ArchitectureHead("LlamaForCausalLM", {}),
    ("mistral", CAUSAL_LM): ArchitectureHead("MistralForCausalLM", {}),
    ("qwen2", CLASSIFICATION): ArchitectureHead("Qwen2ForSequenceClassification", _SCORE),
    ("qwen3", CLASSIFICATION): ArchitectureHead("Qwen3ForSequenceClassification", _SCORE),
    ("gemma", CLASSIFICATION): ArchitectureHead("GemmaForSequenceClassification", _SCORE),
    ("gemma2", CLASSIFICATION): ArchitectureHead("Gemma2ForSequenceClassification", _SCORE),
    ("gemma3_text", CLASSIFICATION): ArchitectureHead("Gemma3TextForSequenceClassification", _SCORE),
    ("smollm3", CLASSIFICATION): ArchitectureHead("SmolLM3ForSequenceClassification", _SCORE),
    ("qwen2", CAUSAL_LM): ArchitectureHead("Qwen2ForCausalLM", {}),
    ("qwen3", CAUSAL_LM): ArchitectureHead("Qwen3ForCausalLM", {}),
    ("gemma", CAUSAL_LM): ArchitectureHead("GemmaForCausalLM", {}),
    ("gemma2", CAUSAL_LM): ArchitectureHead("Gemma2ForCausalLM", {}),
    ("gemma3_text", CAUSAL_LM): ArchitectureHead("Gemma3ForCausalLM", {}),
    ("smollm3", CAUSAL_LM): ArchitectureHead("SmolLM3ForCausalLM", {}),
}


# model_type -> prefix of its classes, layers of the head for classes, activation
_ENCODERS: Final[Mapping[str, tuple[str, Mapping[str, str], str]]] = {
    "camembert": ("Camembert", _ROBERTA, ""),
    "data2vec-text": ("Data2VecText", _ROBERTA, ""),
    "deberta": ("Deberta", {"1": "pooler.dense", "4": "classifier"}, "pooler_hidden_act"),
    "deberta-v2": ("DebertaV2", {"1": "pooler.dense", "4": "classifier"}, "pooler_hidden_act"),
    "ernie": ("Ernie", {"1": "ernie.pooler.dense", "4": "classifier"}, ""),
    "megatron-bert": ("MegatronBert", {"1": "bert.pooler.dense", "4": "classifier"}, ""),
    "mpnet": ("MPNet", _ROBERTA, ""),
    "xlm-roberta-xl": ("XLMRobertaXL", _ROBERTA, ""),
}
for _name, (_prefix, _layers, _activation) in _ENCODERS.items():
    _OWN |= {
        (_name, CLASSIFICATION): ArchitectureHead(f"{_prefix}ForSequenceClassification", _layers, _activation),
        (_name, TAGGING): ArchitectureHead(f"{_prefix}ForTokenClassification", _TAGS),
        (_name, QUESTION_ANSWERING): ArchitectureHead(f"{_prefix}ForQuestionAnswering", _SPANS),
    }
_NORMED = {"0": "head.dense", "2": "head.norm", "4": "classifier"}
_OWN |= {
    ("modernbert", task): ArchitectureHead(f"ModernBertFor{form}", _NORMED, "classifier_activation", has_norm=True)
    for task, form in (
        (CLASSIFICATION, "SequenceClassification"),
        (TAGGING, "TokenClassification"),
        (QUESTION_ANSWERING, "QuestionAnswering"),
    )
}
_OWN |= {(family.model_type, CAUSAL_LM): ArchitectureHead(family.architecture, {}) for family in GENERIC}


# regression uses the classification head with one output
_NUMBERS = {(name, REGRESSION): form for (name, task), form in _OWN.items() if task == CLASSIFICATION}


def architecture_head(model_type: str, task: str) -> ArchitectureHead | None:
    """Return the architecture's form of a task's head; None if it has no equal head."""
    return {**_OWN, **_NUMBERS}.get((model_type, head_task(task)))

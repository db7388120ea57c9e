"""Which heads of AdapterHub are, number for number, the head that an architecture of transformers has itself.

Such a head is saved under the architecture's own names, so that ``AutoModelForSequenceClassification`` and its like
load the whole result, and ``AutoAdapterModel`` too, which turns these names into a head of its own. Any other head
keeps AdapterHub's names, which only ``AutoAdapterModel`` reads.

BERT has AdapterHub's two layers as well: the first is the pooler of its base model.

Source: transformers 4.57, the ``For...`` classes; adapters 1.3.0, ``head_utils.STATIC_TO_FLEX_HEAD_MAP``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ringtune.models.family import (
    CAUSAL_LM,
    CLASSIFICATION,
    IMAGE_CLASSIFICATION,
    QUESTION_ANSWERING,
    REGRESSION,
    TAGGING,
)


class OwnHead(NamedTuple):
    """A head under an architecture's own names.

    Attributes:
        architecture: the class of transformers.
        layers: name of each layer of AdapterHub's head in that class; empty where the head has these names already.
    """

    architecture: str
    layers: Mapping[str, str]


_ROBERTA = {"1": "classifier.dense", "4": "classifier.out_proj"}
_SPANS = {"1": "qa_outputs"}
_SCORE = {"1": "score"}
_TAGS = {"1": "classifier"}

_OWN: Mapping[tuple[str, str], OwnHead] = {
    ("bert", CLASSIFICATION): OwnHead("BertForSequenceClassification", {"1": "bert.pooler.dense", "4": "classifier"}),
    ("roberta", CLASSIFICATION): OwnHead("RobertaForSequenceClassification", _ROBERTA),
    ("xlm-roberta", CLASSIFICATION): OwnHead("XLMRobertaForSequenceClassification", _ROBERTA),
    ("bert", TAGGING): OwnHead("BertForTokenClassification", _TAGS),
    ("roberta", TAGGING): OwnHead("RobertaForTokenClassification", _TAGS),
    ("xlm-roberta", TAGGING): OwnHead("XLMRobertaForTokenClassification", _TAGS),
    ("electra", TAGGING): OwnHead("ElectraForTokenClassification", _TAGS),
    ("distilbert", TAGGING): OwnHead("DistilBertForTokenClassification", _TAGS),
    ("gpt2", TAGGING): OwnHead("GPT2ForTokenClassification", _TAGS),
    ("llama", TAGGING): OwnHead("LlamaForTokenClassification", _SCORE),
    ("mistral", TAGGING): OwnHead("MistralForTokenClassification", _SCORE),
    ("bert", QUESTION_ANSWERING): OwnHead("BertForQuestionAnswering", _SPANS),
    ("roberta", QUESTION_ANSWERING): OwnHead("RobertaForQuestionAnswering", _SPANS),
    ("xlm-roberta", QUESTION_ANSWERING): OwnHead("XLMRobertaForQuestionAnswering", _SPANS),
    ("electra", QUESTION_ANSWERING): OwnHead("ElectraForQuestionAnswering", _SPANS),
    ("distilbert", QUESTION_ANSWERING): OwnHead("DistilBertForQuestionAnswering", _SPANS),
    ("gpt2", QUESTION_ANSWERING): OwnHead("GPT2ForQuestionAnswering", _SPANS),
    ("vit", IMAGE_CLASSIFICATION): OwnHead("ViTForImageClassification", {"1": "classifier"}),
    ("gpt2", CAUSAL_LM): OwnHead("GPT2LMHeadModel", {}),
    ("llama", CAUSAL_LM): OwnHead("LlamaForCausalLM", {}),
    ("mistral", CAUSAL_LM): OwnHead("MistralForCausalLM", {}),
    ("qwen2", CLASSIFICATION): OwnHead("Qwen2ForSequenceClassification", _SCORE),
    ("qwen3", CLASSIFICATION): OwnHead("Qwen3ForSequenceClassification", _SCORE),
    ("gemma", CLASSIFICATION): OwnHead("GemmaForSequenceClassification", _SCORE),
    ("gemma2", CLASSIFICATION): OwnHead("Gemma2ForSequenceClassification", _SCORE),
    ("gemma3_text", CLASSIFICATION): OwnHead("Gemma3TextForSequenceClassification", _SCORE),
    ("smollm3", CLASSIFICATION): OwnHead("SmolLM3ForSequenceClassification", _SCORE),
    ("qwen2", CAUSAL_LM): OwnHead("Qwen2ForCausalLM", {}),
    ("qwen3", CAUSAL_LM): OwnHead("Qwen3ForCausalLM", {}),
    ("gemma", CAUSAL_LM): OwnHead("GemmaForCausalLM", {}),
    ("gemma2", CAUSAL_LM): OwnHead("Gemma2ForCausalLM", {}),
    ("gemma3_text", CAUSAL_LM): OwnHead("Gemma3ForCausalLM", {}),
    ("smollm3", CAUSAL_LM): OwnHead("SmolLM3ForCausalLM", {}),
}


# a number is predicted by a head for classes with one output
_NUMBERS = {(name, REGRESSION): form for (name, task), form in _OWN.items() if task == CLASSIFICATION}


def own_head(model_type: str, task: str) -> OwnHead | None:
    """Return the architecture's own form of the head that a task trains; None if it has another one."""
    return {**_OWN, **_NUMBERS}.get((model_type, task))

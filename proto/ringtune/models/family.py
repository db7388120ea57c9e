"""Description of a family of models: config keys, paths of modules, and shapes to compare a config with its weights.

The code that computes a family is in ``edge.model.families``. Names and shapes not listed here are read from the header
of the weights (``ringtune.models.folder``), and loading compares each with the model that the library builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]

CLASSIFICATION = "sequence-classification"
QUESTION_ANSWERING = "question-answering"
CAUSAL_LM = "causal-lm"
CHAT = "chat"
IMAGE_CLASSIFICATION = "image-classification"
TAGGING = "token-classification"
REGRESSION = "regression"
TASKS = (CLASSIFICATION, REGRESSION, TAGGING, QUESTION_ANSWERING, CAUSAL_LM, CHAT, IMAGE_CLASSIFICATION)
CLASS_TASKS = (CLASSIFICATION, IMAGE_CLASSIFICATION)
"""Tasks with one class per row."""
PAIR_TASKS = (CLASSIFICATION, REGRESSION)
"""Tasks with rows that may have two texts."""
NAMED_TASKS = (*CLASS_TASKS, TAGGING)
"""Tasks with named targets: classes of rows, tags of words."""
LANGUAGE_TASKS = (CAUSAL_LM, CHAT)
"""Tasks of a language model: with all tokens of a text as targets, or those of the answers of a conversation."""
FROZEN_HEAD_TASKS = LANGUAGE_TASKS
"""Tasks with the pretrained model's head, which never trains."""

MAX_BLOCKS = 4096
"""Most blocks of a model."""

LM_HEAD = "lm_head.weight"
"""Head of a causal language model, in every file where it is not tied to the token table."""

_NO_NUMBER = """
    _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path _num_labels adapters architectures
    attn_implementation _attn_implementation _attn_implementation_internal custom_heads dtype finetuning_task id2label
    label2id model_name model_type name_or_path neftune_noise_alpha num_labels output_attentions output_hidden_states
    output_past predict_special_tokens prediction_heads prefix problem_type return_dict special_tokens_map_file
    task_specific_params tie_last_hidden_states tie_weights_ tokenizer_class tokenizer_file torch_dtype torchscript
    transformers.js_config transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache
    classifier_dropout qa_dropout seq_classif_dropout summary_activation summary_first_dropout summary_last_dropout
    summary_proj_to_labels summary_type summary_use_proj
    bos_token_id eos_token_id sep_token_id decoder_start_token_id bos_token_ids eos_token_ids pad_token_ids
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
    chunk_size_feed_forward cross_attention_hidden_size gradient_checkpointing is_encoder_decoder pretraining_tp
    tf_legacy_loss tie_encoder_decoder
"""
NO_NUMBER = frozenset(_NO_NUMBER.split())
"""Keys of ``config.json`` without effect on numbers in any family: origin, task, options of ``generate``, dropout and
shape of heads (which are built anew), and choices of kernel.

Source: ``PretrainedConfig`` and the configurations of the families in transformers 4.57 and 5.24; other programs' keys.
"""

ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh")


def head_task(task: str) -> str:
    """Return the task by whose name families and heads know a task's head: chat has that of ``causal-lm``."""
    return CAUSAL_LM if task == CHAT else task


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigKey:
    """One supported key of ``config.json``.

    Attributes:
        default: of the family where the key is absent; its type is the key's type.
        at_least: smallest allowed number.
        choices: allowed values; empty: any.
        nullable: type of a key that may also be null; None: null means the default.
    """

    default: Any
    at_least: float = 0
    choices: tuple[Any, ...] = ()
    nullable: type | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimensions:
    """Sizes of a config for planning.

    Attributes:
        num_blocks: transformer blocks.
        hidden: width of the hidden state.
        inner: width of the feed-forward part.
        num_heads: attention heads.
        vocab: rows of the token table; 0 without one.
        longest: most tokens of a row.
        fixed: whether every row has exactly ``longest`` tokens.
        inner_kept: tensors of width ``inner`` that the feed-forward part keeps for backward.
        kv_heads: key/value heads; 0 = ``num_heads``.
        keeps_down_input: whether the activation function keeps the input of the feed-forward part's last matrix.
        attention: width of all heads together; 0 = ``hidden``.
        more_kept: values per token that norms of a block keep for backward, besides those of the usual two norms.
        kept_scores: number of score tensors (value per head and token pair) that attention keeps without dropout.
    """

    num_blocks: int
    hidden: int
    inner: int
    num_heads: int
    vocab: int
    longest: int
    fixed: bool = False
    inner_kept: int = 1
    kv_heads: int = 0
    keeps_down_input: bool = False
    attention: int = 0
    more_kept: int = 0
    kept_scores: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """Matrices that LoRA and related methods wrap, each as (inputs, outputs).

    Attributes:
        query: of the attention.
        key: of the attention.
        value: of the attention.
        intermediate: wrapped by the library's ``intermediate_lora``.
        output: wrapped by the library's ``output_lora``.
        merged: whether query, key and value are one matrix.
        swapped: whether ``intermediate`` is the last matrix of the feed-forward part, and ``output`` the first.
    """

    query: tuple[int, int]
    key: tuple[int, int]
    value: tuple[int, int]
    intermediate: tuple[int, int]
    output: tuple[int, int]
    merged: bool = False
    swapped: bool = False

    @staticmethod
    def plain(hidden: int, inner: int, *, merged: bool = False) -> Widths:
        """Widths of a block with square attention matrices."""
        square = (hidden, hidden)
        return Widths(
            query=square, key=square, value=square, intermediate=(hidden, inner), output=(inner, hidden), merged=merged
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        model_type: of ``config.json``.
        tasks: those of ``TASKS`` for which it has a head.
        config_keys: supported keys. With ``refused``, ``no_number`` and ``NO_NUMBER`` they are all keys of the
            configuration class; any other key is refused.
        refused: key that must be absent, null or falsy -> reason.
        no_number: further keys without effect on numbers.
        aliases: other name of a key -> key.
        prefix: of all names in files that were saved with a task head, such as ``bert.``.
        blocks_path: dotted path of the list of blocks in the base model.
        owner_paths: dotted paths of modules that an owner holds besides blocks, as far as a model has them; tensors
            that are neither in a block nor here are never read.
        head_paths: those of ``owner_paths`` after the last block, such as a last norm; where all parameters train they
            belong to the head, the others to the embedding.
        dimensions: config -> dimensions.
        widths: config -> matrices that LoRA wraps.
        block_shapes: config -> name inside the block -> shape, of every required tensor of a block.
        owner_shapes: config -> name -> shape, of every required tensor outside the blocks.
        subnet_weights: names inside the block of the tensors that are divided among its subnets, as far as a model has
            them: weights and biases of query, key, value and the feed-forward part's first matrices, weights of both
            output matrices. The rest belongs to the whole block: norms, and biases of both output matrices.
        unused_paths: modules of the base model that a file may have and no node hosts.
        problem: config -> reason why its values are inconsistent; empty if they are not.
        first_token: tasks with a head that reads only the first token of each row.
        trims: whether a block can compute its first tokens only, with attention to all.
        plugged: whether AdapterHub has no model class for it, so that adapters are added by its plug-in interface; the
            classification head is then the architecture's own: one matrix without bias.
    """

    model_type: str
    tasks: tuple[str, ...]
    config_keys: Mapping[str, ConfigKey]
    prefix: str
    blocks_path: str
    owner_paths: tuple[str, ...]
    dimensions: Callable[[Config], Dimensions]
    widths: Callable[[Config], Widths]
    block_shapes: Callable[[Config], Shapes]
    owner_shapes: Callable[[Config], Shapes]
    subnet_weights: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    no_number: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    head_paths: tuple[str, ...] = ()
    unused_paths: tuple[str, ...] = ()
    problem: Callable[[Config], str] = lambda config: ""
    first_token: tuple[str, ...] = ()
    trims: bool = False
    plugged: bool = False

    def head_tokens(self, task: str) -> int:
        """Number of first tokens of each row that the head of a task reads; 0 = all, or unknown."""
        return 1 if task in self.first_token else 0

    @property
    def block_prefix(self) -> str:
        """Common prefix of the names of all blocks; the index of the block follows."""
        return f"{self.blocks_path}."


def linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Shapes:
    """Shapes of a linear layer's tensors."""
    weight: Shapes = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if bias else weight


def divided(into: tuple[str, ...], out: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the tensors of linear layers that are divided among subnets.

    Args:
        into: layers with outputs in a subnet: weight and bias are divided.
        out: layers with inputs in a subnet: only the weight is divided.
    """
    return (*(f"{name}.{kind}" for name in into for kind in ("weight", "bias")), *(f"{name}.weight" for name in out))


def layer_norm(name: str, width: int) -> Shapes:
    """Shapes of a layer norm's tensors."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def kept_by(activation: str) -> int:
    """Number of tensors of the inner width that an activation function keeps for backward.

    Measured with adapters 1.3.0; ``tests/edge/model/test_sizes.py`` compares the estimate with measured bytes.
    """
    return {"gelu_new": 4, "gelu_fast": 4, "quick_gelu": 2}.get(activation, 1)


def keeps_result(activation: str) -> bool:
    """Whether the backward of an activation function needs its result instead of its input."""
    return activation in ("relu", "tanh")


def indivisible(hidden: int, heads: int) -> str:
    """Say that a width is no multiple of the number of heads; empty if it is."""
    return f"hidden_size {hidden} can't be shared by {heads} heads" if hidden % heads else ""

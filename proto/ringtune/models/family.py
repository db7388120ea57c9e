"""The description of a family of models on disk, beyond the header of its weights.

A pure description beside the code that computes (``edge.model.families``): the config keys that count, the places of
the blocks, and the shapes by which a config is compared with its weights. All other names and shapes are read from the
header (``ringtune.models.folder``), and loading compares each with the model that the library builds.
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
IMAGE_CLASSIFICATION = "image-classification"
TAGGING = "token-classification"
REGRESSION = "regression"
TASKS = (CLASSIFICATION, REGRESSION, TAGGING, QUESTION_ANSWERING, CAUSAL_LM, IMAGE_CLASSIFICATION)
CLASS_TASKS = (CLASSIFICATION, IMAGE_CLASSIFICATION)
"""Tasks with rows of one class each."""
PAIR_TASKS = (CLASSIFICATION, REGRESSION)
"""Tasks with rows that may be two texts each."""
NAMED_TASKS = (*CLASS_TASKS, TAGGING)
"""Tasks with targets that have names: the classes of rows, the tags of words."""
FROZEN_HEAD_TASKS = (CAUSAL_LM,)
"""Tasks with the pretrained model's own head, which never trains."""

MAX_BLOCKS = 4096
"""Most blocks of a model that can be planned."""

LM_HEAD = "lm_head.weight"
"""The decoder of a causal language model, in every file that has one of its own."""

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
"""Keys of ``config.json`` that change no number of any family: where it was saved and for what, how ``generate`` picks,
dropout and shape of heads that are made anew, how the same result is computed.

Source: ``PretrainedConfig`` and the configurations of the families in transformers 4.57 and 5.24; what other programs
write beside them.
"""

ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigKey:
    """One key of ``config.json`` that is carried out.

    Attributes:
        default: the value that the family assumes when the key is absent; its type is the key's type.
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
    """The sizes of a config for planning, whatever its keys are called.

    Attributes:
        num_blocks: transformer blocks.
        hidden: width of the hidden state.
        inner: width of the feed-forward part.
        num_heads: attention heads.
        vocab: rows of the token table; 0 without one.
        longest: tokens that the model takes at most.
        fixed: whether every row has exactly ``longest`` tokens.
        inner_kept: tensors of width ``inner`` that the feed-forward part keeps for backward.
        kv_heads: key/value heads; 0 = as many as ``num_heads``.
        keeps_down_input: whether the activation function keeps what enters the last matrix of the feed-forward part.
        attention: width of all heads together; 0 = ``hidden``.
        more_kept: values of each token that further norms of a block keep for backward, besides the usual two.
        kept_scores: how often attention keeps its scores, for each head and token pair, without dropout.
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
    """The matrices that LoRA and its relatives wrap, each as (inputs, outputs).

    Attributes:
        query: of the attention.
        key: of the attention.
        value: of the attention.
        intermediate: what the library calls ``intermediate_lora``.
        output: what it calls ``output_lora``.
        merged: query, key and value are one matrix.
    """

    query: tuple[int, int]
    key: tuple[int, int]
    value: tuple[int, int]
    intermediate: tuple[int, int]
    output: tuple[int, int]
    merged: bool = False

    @staticmethod
    def plain(hidden: int, inner: int, *, merged: bool = False) -> Widths:
        """The widths of a block with square attention matrices."""
        square = (hidden, hidden)
        return Widths(
            query=square, key=square, value=square, intermediate=(hidden, inner), output=(inner, hidden), merged=merged
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        model_type: of ``config.json``.
        tasks: of ``TASKS``, those that it has a head for.
        config_keys: keys that are carried out. With ``refused``, ``no_number`` and ``NO_NUMBER`` they are all that its
            configuration class knows; a key in none of them is refused.
        refused: keys that must be absent, null or falsy, with the reason.
        no_number: further keys that change no number of this family.
        aliases: other names of keys that the configuration class takes as well.
        prefix: of all names in files that were saved with a task head, e.g. ``bert.``.
        blocks_path: dotted path of the list of blocks in the base model.
        owner_paths: dotted paths of what an owner holds besides blocks, as far as a model has it; what is neither a
            block nor in this list is never read.
        head_paths: those of them that a hidden state passes after the last block, such as a last norm; where everything
            trains they belong to the head, the others to the embedding.
        dimensions: config -> dimensions.
        widths: config -> matrices that LoRA wraps.
        block_shapes: config -> name inside the block -> shape, of every tensor that a block has to have.
        owner_shapes: config -> name -> shape, of every such tensor outside the blocks.
        subnet_weights: names inside the block of what is divided among its subnets, as far as a model has it: weights
            and biases of query, key, value and of the way into the feed-forward part, weights of both ways out. What is
            left belongs to the whole block: norms, and the biases of both ways out.
        unused_paths: parts of the base model that a file may have and no node hosts.
        problem: config -> why these values don't fit together; empty if they do.
        first_token: tasks whose head reads the first token of each row and no other.
        trims: whether a block can compute its first tokens only, and attend to all.
        plugged: whether AdapterHub has no model class of its own, so that adapters are put in by its plug-in interface.
            Its classification head is the one that the architecture has itself: one matrix without bias.
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
        """Tokens of each row, from the first on, that the head of a task reads; 0 = all of them, or not known."""
        return 1 if task in self.first_token else 0

    @property
    def block_prefix(self) -> str:
        """The common beginning of the names of all blocks; the index of the block follows."""
        return f"{self.blocks_path}."


def linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Shapes:
    """The shapes of a linear layer's tensors by name."""
    weight: Shapes = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if bias else weight


def divided(into: tuple[str, ...], out: tuple[str, ...]) -> tuple[str, ...]:
    """The names of what linear layers have in each subnet: weight and bias of a way in, the weight of a way out."""
    return (*(f"{name}.{kind}" for name in into for kind in ("weight", "bias")), *(f"{name}.weight" for name in out))


def layer_norm(name: str, width: int) -> Shapes:
    """The shapes of a layer norm's tensors by name."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def kept_by(activation: str) -> int:
    """How many tensors of the inner width an activation function keeps for backward.

    Measured with adapters 1.3.0; ``tests/edge/model/test_sizes.py`` holds the estimate that uses it to measured bytes.
    """
    return {"gelu_new": 4, "gelu_fast": 4, "quick_gelu": 2}.get(activation, 1)


def keeps_result(activation: str) -> bool:
    """Whether the backward of an activation function needs its result, where the others need what entered them."""
    return activation in ("relu", "tanh")


def indivisible(hidden: int, heads: int) -> str:
    """Why a width can't be shared by heads; empty if it can."""
    return f"hidden_size {hidden} can't be shared by {heads} heads" if hidden % heads else ""

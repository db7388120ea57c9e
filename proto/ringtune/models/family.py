"""Description of a family of models: config keys, paths of modules, and shapes to compare a config with its weights.

The code that computes a family is in ``edge.model.families``. Names and shapes not listed here are read from the header
of the weights (``ringtune.models.folder``), and loading compares each with the model that the library builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringtune.models.passed_values import PassedValues

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

MAX_LONGEST = 1 << 24
"""Most tokens of the longest text of a model, for each of which classes of transformers make a number or a few."""

GATE_AND_UP = ("gate_up_proj", "mlp.Wi")
"""Ends of the names of matrices of ``gate`` and ``up`` in one."""

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

CHUNK = 64
"""Tokens that a gated delta net computes together."""

ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh")


def in_chunks(tokens: int) -> int:
    """Return the tokens of a row that is padded to whole chunks. Example: 128 for 65 tokens."""
    return -(-tokens // CHUNK) * CHUNK


def head_task(task: str) -> str:
    """Return the task by whose name families and heads know a task's head: chat has that of ``causal-lm``."""
    return CAUSAL_LM if task == CHAT else task


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigKey:
    """One supported key of ``config.json``.

    Attributes:
        default: of the family where the key is absent; its type is the key's type.
        choices: allowed values; empty: any.
        nullable: type of a key that may also be null; None: null means the default.
    """

    default: Any
    at_least: float = 0
    choices: tuple[Any, ...] = ()
    nullable: type | None = None


def counts(**defaults: int) -> dict[str, ConfigKey]:
    """Declare keys that are whole numbers from 1 on, by their defaults."""
    return {name: ConfigKey(default=default, at_least=1) for name, default in defaults.items()}


def plain(**defaults: float | bool) -> dict[str, ConfigKey]:
    """Declare keys that may have any value from 0 on of the type of their defaults."""
    return {name: ConfigKey(default=default) for name, default in defaults.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimensions:
    """Sizes of a config for planning.

    Attributes:
        vocab: rows of the token table; 0 without one.
        fixed: whether every row has exactly ``longest`` tokens.
        inner_kept: tensors of width ``inner`` that the feed-forward part keeps for backward.
        kv_heads: key/value heads; 0 = ``num_heads``.
        keeps_down_input: whether the activation function keeps the input of the feed-forward part's last matrix.
        attention: width of all heads together; 0 = ``hidden``.
        more_kept: values per token that norms of a block keep for backward, besides those of the usual two norms.
        kept_scores: number of score tensors (value per head and token pair) that attention keeps without dropout.
        row_kept: values that a block keeps for each row, whatever its length, such as projected relative positions.
        more_masks: numbers for every two tokens of a row that all blocks read, besides those of the mask.
        repeats: how often a block is applied to its own output, as layers that share their weights are.
        chunk_kept: values that a block keeps for each token of a row that is padded to a multiple of ``CHUNK``.
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
    row_kept: int = 0
    more_masks: int = 0
    repeats: int = 1
    chunk_kept: int = 0

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return (self.attention or self.hidden) // self.num_heads


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """Matrices that LoRA and related methods wrap, each as (inputs, outputs).

    Attributes:
        merged: whether query, key and value are one matrix.
        swapped: whether ``intermediate`` is the last matrix of the feed-forward part, and ``output`` the first.
        apart: whether queries, keys and values are made of different tensors.
        attention_out: the matrix after attention, in a generic family.
        shares_hidden: whether a matrix without a role (``BlockLayout.shared``) reads those of their inputs that are as
            wide as the hidden state.
    """

    query: tuple[int, int]
    key: tuple[int, int]
    value: tuple[int, int]
    intermediate: tuple[int, int]
    output: tuple[int, int]
    merged: bool = False
    swapped: bool = False
    apart: bool = False
    attention_out: tuple[int, int] = (0, 0)
    shares_hidden: bool = False

    @staticmethod
    def plain(hidden: int, inner: int, *, merged: bool = False) -> Widths:
        """Widths of a block with square attention matrices."""
        square = (hidden, hidden)
        return Widths(
            query=square, key=square, value=square, intermediate=(hidden, inner), output=(inner, hidden), merged=merged
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLayout:
    """Dotted names of the modules in a block of one family: matrices that subnets share, norms, and places of adapters.

    In the Llama family the library's ``intermediate_lora`` wraps the matrix ``down``, and its ``output_lora`` the
    matrix ``up``; here a module has the name of its function. For plugged-in adapters both names are right.

    Source: the modules of transformers 4.57 and adapters 1.3.0.

    Attributes:
        attention: module of the attention itself.
        query: matrix of the queries; the same as ``key`` and ``value`` for a fused matrix of three equal parts. Another
            fused matrix is ``value``; the other two are empty.
        up: first matrix of the feed-forward part.
        gate: matrix of the gate beside ``up``; empty without one.
        down: output matrix of the feed-forward part.
        attention_norm: before the attention, or after it and the residual.
        attention_adapter: bottleneck after the attention; adds the residual.
        feed_forward_adapter: bottleneck after the feed-forward part; adds the residual.
        norm_first: whether norms are before attention and feed-forward part, not after them.
        inputs_first: whether matrices are stored with a row for each input, not for each output.
        swaps_lora: whether the library calls ``down`` the intermediate matrix and ``up`` the output.
        adds_residual: whether the block adds the residual after its plugged-in bottleneck.
        query_norm: norm of each head's queries, before the rotation; empty without one.
        attention_last_norm: norm of the attention's output, after its bottleneck; empty without one.
        norms_have_bias: whether norms have a bias beside their weight.
        attention_dropout: dropout of the attention's output; empty without one.
        instead: (role, matrix) of a matrix that some blocks have in place of that of the role. Without attention all
            that a block computes of its input counts as the values'.
        shared: (matrix, other one): the other one of a block has no role and reads the same input, which is kept for it
            where own weights train.
        optional: roles of which some blocks have no matrix.
        order: in which the block computes queries, keys and values, and draws the dropout of their LoRA.
    """

    attention: str
    query: str
    key: str
    value: str
    attention_out: str
    up: str
    gate: str = ""
    activation: str
    down: str
    attention_norm: str
    feed_forward_norm: str
    attention_adapter: str
    feed_forward_adapter: str
    norm_first: bool
    inputs_first: bool = False
    swaps_lora: bool = False
    adds_residual: bool = False
    query_norm: str = ""
    key_norm: str = ""
    attention_last_norm: str = ""
    feed_forward_last_norm: str = ""
    norms_have_bias: bool = True
    attention_dropout: str = ""
    feed_forward_dropout: str = ""
    instead: tuple[tuple[str, str], ...] = ()
    shared: tuple[tuple[str, str], ...] = ()
    optional: tuple[str, ...] = ()
    order: tuple[str, ...] = ("query", "key", "value")

    def matrices_of(self, role: str) -> tuple[str, ...]:
        """Return the matrices that have a role, of which a block of a generic family has one at most."""
        path_of_role = getattr(self, role)
        return (*([path_of_role] if path_of_role else []), *(path for other, path in self.instead if other == role))

    @property
    def is_unlike(self) -> bool:
        """Whether blocks may have LoRA beside different matrices."""
        return bool(self.instead or self.optional)

    @property
    def is_merged(self) -> bool:
        """Whether queries, keys and values have one fused matrix, of which each is a third."""
        return bool(self.query) and self.query == self.key

    @property
    def lora_intermediate(self) -> str:
        """Matrix of the library's ``intermediate_lora``; in the Llama family ``down``."""
        return self.down if self.swaps_lora else self.up

    @property
    def lora_output(self) -> str:
        """Matrix of the library's ``output_lora``; in the Llama family ``up``."""
        return self.up if self.swaps_lora else self.down


_INTO = ("query", "key", "value", "up", "gate")
_OUT = ("attention_out", "down")
MATRICES = (*_INTO, *_OUT)
"""Matrices of a block, by their field in ``BlockLayout``."""
_BUFFERS = ("e_score_correction_bias", "expert_bias", "act_fn.bias", "act_fn.eps", "layer_scalar")
"""Ends of the names of what blocks have in files without a gradient: a router's choice, numbers of an activation, a
factor of the whole block (Gemma 4).

Apertus's ``act_fn.beta`` is ``act_fn.bias`` by ``models.folder.base_name``.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family of models.

    Attributes:
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
        biased: config -> those of ``MATRICES`` that have a bias.
        owner_shapes: config -> name -> shape, of every required tensor outside the blocks.
        unused_paths: modules of the base model that a file may have and no node hosts.
        as_read: values of ``config.json`` -> the same with one form of each.
        shared_paths: dotted paths of modules outside the blocks that every host reads, as far as a model has them:
            tables from which the other inputs of its blocks are computed.
        problem: config -> reason why its values are inconsistent; empty if they are not.
        first_token: tasks with a head that reads only the first token of each row.
        trims: whether a block can compute its first tokens only, with attention to all.
        plugged: whether AdapterHub has no model class for it, so that adapters are added by its plug-in interface; the
            classification head is then the architecture's own: one matrix without bias.
        generic: whether its forward is the library's own (``models.generic_decoders``, ``models.generic_encoders``);
            without ``config_keys`` with all keys of its config.
        packs: whether a sequence may have several rows.
        divided: whether the forward of a generic family's attention, ``self_attn``, and of its feed-forward part,
            ``mlp``, is right with the matrices of some heads and of some rows alone.
        architecture: class of transformers with the language model's head, of a generic family.
        methods: kinds of adapters of a plugged-in family.
        joined: whether attention and feed-forward part read one tensor, in every model or in some.
        twice: matrices that multiply something else besides the block's hidden state, such as relative positions.
        apart: whether queries, keys and values are made of different tensors, as in latent attention.
        unfitted: matrices beside which no helper fits adapters: they read the tokens of all rows as one list, or they
            are applied several times.
        head: name of the language model's head in its class.
        since: first version of transformers that has it.
        passed: config -> what blocks pass on besides one hidden state; None = nothing.
        unread: config -> prefixes of names of tensors that files may have, and no block reads.
        tied: whether head and token table are one where a generic family's config does not say so.
    """

    model_type: str
    tasks: tuple[str, ...]
    config_keys: Mapping[str, ConfigKey]
    prefix: str
    blocks_path: str
    owner_paths: tuple[str, ...]
    dimensions: Callable[[Config], Dimensions]
    layout: BlockLayout
    owner_shapes: Callable[[Config], Shapes]
    biased: Callable[[Config], tuple[str, ...]] = lambda config: MATRICES
    refused: Mapping[str, str] = field(default_factory=dict)
    no_number: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    head_paths: tuple[str, ...] = ()
    unused_paths: tuple[str, ...] = ()
    as_read: Callable[[Config], dict[str, Any]] = dict
    shared_paths: tuple[str, ...] = ()
    problem: Callable[[Config], str] = lambda config: ""
    first_token: tuple[str, ...] = ()
    trims: bool = False
    plugged: bool = False
    generic: bool = False
    packs: bool = True
    divided: bool = False
    architecture: str = ""
    methods: tuple[str, ...] = ("bottleneck", "lora", "reft")
    joined: bool = False
    twice: tuple[str, ...] = ()
    unfitted: tuple[str, ...] = ()
    apart: bool = False
    embeddings_path: str = "embed_tokens"
    head: str = "lm_head"
    head_bias: bool = False
    tied: bool = False
    since: int = 4
    passed: Callable[[Config], PassedValues | None] = lambda config: None
    unread: Callable[[Config], tuple[str, ...]] = lambda config: ()

    def takes_cache(self, config: Config) -> bool:
        """Whether blocks can compute a token behind their own kept keys and values, as its position is an argument."""
        passed = self.passed(config)
        has_own = passed is None or not passed.shared
        return CAUSAL_LM in self.tasks and (self.packs or not self.generic) and has_own

    def head_tokens(self, task: str) -> int:
        """Number of first tokens of each row that the head of a task reads; 0 = all, or unknown."""
        return 1 if task in self.first_token else 0

    @property
    def block_prefix(self) -> str:
        """Common prefix of the names of all blocks; the index of the block follows."""
        return f"{self.blocks_path}."

    @property
    def subnet_weights(self) -> tuple[str, ...]:
        """Names inside the block of the tensors that are divided among its subnets, as far as a model has them.

        These are weights and biases of query, key, value and the feed-forward part's first matrices, and weights of
        both output matrices. The rest belongs to the whole block: norms, and biases of both output matrices.
        """
        into, out = ([name for role in roles if (name := getattr(self.layout, role))] for roles in (_INTO, _OUT))
        return tuple(dict.fromkeys([f"{name}.{kind}" for name in into for kind in ("weight", "bias")])) + tuple(
            f"{name}.weight" for name in out
        )

    def trains(self, name: str, *, all_parameters: bool = False) -> bool:
        """Whether a tensor of a block trains with ``adapter.config = "full"``, or where all parameters train.

        Of a generic family these are the same, as in plain fine-tuning: norms, experts and routers too.
        """
        return not name.endswith(_BUFFERS) if self.generic or all_parameters else name in self.subnet_weights

    def widths(self, config: Config) -> Widths:
        """Return the matrices that LoRA wraps."""
        layout, ends = self.layout, self._ends(config)
        first, last = ("down", "up") if layout.swaps_lora else ("up", "down")
        return Widths(
            query=ends["query"],
            key=ends["key"],
            value=ends["value"],
            intermediate=ends[first],
            output=ends[last],
            merged=layout.is_merged,
            swapped=layout.swaps_lora,
        )

    def stored_widths(self, shapes: Shapes, block: int) -> Widths:
        """Return the matrices that LoRA wraps in one block of a generic family, by the shapes of its tensors."""
        start = f"{self.block_prefix}{block}."

        def shape(path: str) -> tuple[int, ...]:
            return shapes.get(f"{start}{path}.weight", ())

        def ends(role: str) -> tuple[int, int]:
            outputs, inputs = next(filter(None, map(shape, self.layout.matrices_of(role))), (0, 0))
            return inputs, outputs

        query, key, value, first, last = (ends(role) for role in ("query", "key", "value", "up", "down"))
        return Widths(
            query=query,
            key=key,
            value=value,
            intermediate=first,
            output=last,
            apart=self.apart,
            attention_out=ends("attention_out"),
            shares_hidden=any(shape(path) and shape(other) for path, other in self.layout.shared),
        )

    def block_shapes(self, config: Config) -> Shapes:
        """Return name inside the block -> shape, of every required tensor of a block; none of a generic family."""
        if self.generic:
            return {}
        layout, ends, biased = self.layout, self._ends(config), self.biased(config)
        if layout.is_merged:
            ends["query"] = (ends["query"][0], sum(ends[name][1] for name in ("query", "key", "value")))
        shapes: Shapes = {}
        for role, (inputs, outputs) in ends.items():
            name = getattr(layout, role)
            if not name or f"{name}.weight" in shapes:  # a fused matrix is there under its first role
                continue
            shapes[f"{name}.weight"] = (inputs, outputs) if layout.inputs_first else (outputs, inputs)
            if role in biased:
                shapes[f"{name}.bias"] = (outputs,)
        sizes = self.dimensions(config)
        norms = dict.fromkeys(("attention_norm", "feed_forward_norm"), sizes.hidden)
        norms |= dict.fromkeys(("attention_last_norm", "feed_forward_last_norm"), sizes.hidden)
        norms |= dict.fromkeys(("query_norm", "key_norm"), sizes.head_width)
        for role, width in norms.items():
            if name := getattr(layout, role):
                shapes |= layer_norm(name, width) if layout.norms_have_bias else {f"{name}.weight": (width,)}
        return shapes

    def _ends(self, config: Config) -> dict[str, tuple[int, int]]:
        """Return inputs and outputs of each of ``MATRICES``."""
        sizes = self.dimensions(config)
        hidden, inner, width = sizes.hidden, sizes.inner, sizes.num_heads * sizes.head_width
        shared = (hidden, (sizes.kv_heads or sizes.num_heads) * sizes.head_width)
        out = {
            "attention_out": (width, hidden),
            "up": (hidden, inner),
            "gate": (hidden, inner),
            "down": (inner, hidden),
        }
        ends = {"query": (hidden, width), "key": shared, "value": shared, **out}
        if self.generic:
            layout = self.layout
            if not layout.query:
                ends["value"] = (hidden, width + 2 * shared[1])
            if layout.up.endswith(GATE_AND_UP):
                ends["up"] = (hidden, 2 * inner)
            ends |= {role: (0, 0) for role in ends if not getattr(layout, role)}
        return ends


def linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Shapes:
    """Shapes of a linear layer's tensors."""
    weight: Shapes = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if bias else weight


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


def plain_dimensions(
    config: Config,
    *,
    blocks: str = "num_hidden_layers",
    hidden: str = "hidden_size",
    inner: str = "intermediate_size",
    heads: str = "num_attention_heads",
    longest: str = "max_position_embeddings",
    activation: str = "hidden_act",
) -> Dimensions:
    """Dimensions of a model with one matrix before its activation function, from these keys of its config."""
    return Dimensions(
        num_blocks=config[blocks],
        hidden=config[hidden],
        inner=config[inner] or 4 * config[hidden],
        num_heads=config[heads],
        vocab=config.get("vocab_size", 0),
        longest=config.get(longest, 0),
        inner_kept=kept_by(config[activation]),
        keeps_down_input=keeps_result(config[activation]),
    )

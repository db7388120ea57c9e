"""GGUF files for llama.cpp and Ollama: a whole language model, or a LoRA beside its base model.

The package ``gguf`` (the extra ``gguf``) writes the format. Here is what it leaves to its callers: the facts of a
config, the values that llama.cpp stores in another form, and the tokenizer. Values keep their type; vectors are
float32, as llama.cpp expects, and so is what was float64. A model that llama.cpp would compute otherwise is refused by
name.

========================  ==========================================================================================
what                      in GGUF
========================  ==========================================================================================
query, key of Llama       the two halves of each head interleaved, since llama.cpp turns neighbouring values
norms of Gemma            1 added, which transformers adds in forward
multipliers of Granite    facts, each as its own; its query and key are as Llama's
matrices of GPT-2         transposed, outputs first
Llama 3's rope scaling    a tensor of factors, one for each pair of values
layers with a window      computed as such for Gemma 2 and 3; for others the context length is at most the window
LoRA                      W + alpha / r * B A as in PEFT, the rows of B in the order of the rows of W
========================  ==========================================================================================

Source: the GGUF specification, and the loaders and tokenizers of llama.cpp (``llama-model.cpp``, ``llama-vocab.cpp``,
``llama-adapter.cpp``) as of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ringtune.errors import UsageError
from ringtune.hints import hint_to_install
from ringtune.models.conversations import BEGIN
from ringtune.models.decoders import FULL, SLIDING, head_width, rope_type, sliding_window
from ringtune.models.families import FAMILIES
from ringtune.models.folder import NO_WEIGHTS, model_dimensions, read_config, read_headers
from ringtune.models.gguf import ADDS_ONE, GPT2_SPLIT, INTERLEAVED, LARGEST_GEMMA, SPLITS, rope_factors
from ringtune.models.tokenizer import WHOLE_FILE, chat_templates
from ringtune.storage.strict import read_json
from ringtune.storage.tensor_files import TensorFile, TensorInfo

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter, TensorNameMap

    Array = np.ndarray[Any, Any]

MODEL_NAME: Final = "model.gguf"
LORA_NAME: Final = "lora.gguf"
MODELFILE: Final = "Modelfile"

_HAS_WINDOWS: Final = {"gemma2": 2, "gemma3_text": 6}
"""Models whose windows llama.cpp applies -> n, where every n-th layer has none."""

_ARCHITECTURES: Final = {"mistral": "llama", "gemma3_text": "gemma3"}
"""``model_type`` -> name in GGUF, where they differ."""

_GRANITE: Final = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
"""Multiplier of a Granite, 1 if its config has none -> its name in GGUF."""
_LOCAL_BASE: Final = 10000.0
_ACTIVATIONS: Final = {"gpt2": ("gelu_new",), **dict.fromkeys(ADDS_ONE, ("gelu_pytorch_tanh", "gelu_new"))}


def gguf_refusal(config: Mapping[str, Any]) -> str:
    """Say why llama.cpp can't compute a model of this checked config as transformers does; empty if it can."""
    name, size = config["model_type"], model_dimensions(config)
    if FAMILIES[name].generic and name != "granite":
        return f"RingTune does not know llama.cpp's form of a {name}"
    activation = str(config.get("hidden_activation") or config.get("hidden_act") or config.get("activation_function"))
    if activation not in (known := _ACTIVATIONS.get(name, ("silu",))):
        return f"llama.cpp has {known[0]} there, the model {activation}"
    if name == "granite" and (zero := next((key for key in _GRANITE if config.get(key, 1.0) == 0), "")):
        return f"{zero} is 0, which llama.cpp takes for none"
    scaling, kind = config.get("rope_scaling") or {}, rope_type(config)
    if odd := sorted(scaling.keys() & {"mscale", "mscale_all_dim", "truncate"}):
        return f"rope_scaling has {', '.join(odd)}, which llama.cpp does not apply"
    if kind == "llama3" and name not in ("llama", "mistral"):
        return f"llama.cpp reads rope factors in Llama only, not in {name}"
    if config.get("rope_local_base_freq", _LOCAL_BASE) != _LOCAL_BASE:
        return f"rope_local_base_freq is {config['rope_local_base_freq']:g}, llama.cpp has {_LOCAL_BASE:g}"
    if config.get("attention_bias") and name != "llama":
        return "attention_bias adds vectors that llama.cpp does not read"
    if any(value != int((index + 1) % 4 != 0) for index, value in enumerate(config.get("no_rope_layers") or ())):
        return "llama.cpp leaves rotary positions out in every fourth layer, the model in others"
    every, types = _HAS_WINDOWS.get(name), config.get("layer_types") or ()
    if every and any(layer != (SLIDING if (index + 1) % every else FULL) for index, layer in enumerate(types)):
        return f"llama.cpp has a window in all layers but each {every}th one, the model in others"
    scalar, width = config.get("query_pre_attn_scalar"), head_width(config) if name != "gpt2" else 0
    largest = size.num_blocks == LARGEST_GEMMA.get(name)
    if scalar is not None and scalar != (size.hidden // size.num_heads if largest else width):
        return f"query_pre_attn_scalar is {scalar:g}, llama.cpp scales by another value"
    return ""


def check_model(folder: Path) -> dict[str, Any]:
    """Return the config of a model that can be written; arguments and errors as of ``write_model``."""
    _require_gguf()
    config = read_config(folder)
    if problem := gguf_refusal(config):
        raise UsageError(f"this model can't be GGUF: {problem}; use --format adapterhub, peft, or --merge")
    _read_tokenizer(folder)
    return config


def write_model(folder: Path, target: Path, *, name: str, template: str = "") -> None:
    """Write a model of transformers as one GGUF file; one tensor at a time is in memory.

    Args:
        folder: with config, safetensors and ``tokenizer.json``.
        target: file to write.
        name: of the model, as llama.cpp shows it.
        template: chat template that it learned; empty = the folder's own.

    Raises:
        UsageError: the package ``gguf`` is missing, llama.cpp computes the model otherwise, or its tokenizer has none
            of llama.cpp's forms.
        ModelError: the folder is no model.
    """
    config = check_model(folder)
    writer = _writer(target, config)
    writer.add_type("model")
    writer.add_name(name)
    _add_facts(writer, config)
    _add_tokenizer(writer, folder, template, vocab=model_dimensions(config).vocab)
    _write(writer, list(_tensors(folder, config)))


def write_lora(tensors: TensorFile, described: Mapping[str, Any], config: Mapping[str, Any], target: Path) -> None:
    """Write a LoRA as one GGUF file, which llama.cpp adds to its base model.

    Args:
        tensors: ``adapter_model.safetensors`` of a folder of PEFT.
        described: its ``adapter_config.json``.
        config: checked config of the base model.
        target: file to write.

    Raises:
        UsageError: the package ``gguf`` is missing, or llama.cpp computes the base model otherwise.
    """
    _require_gguf()
    if problem := gguf_refusal(config):
        raise UsageError(f"the adapter can't be GGUF: {problem}; use --format peft")
    writer, form, alpha = _writer(target, config), _Form.of(config), float(described["lora_alpha"])
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    patterns, written = described.get("alpha_pattern", {}), []
    for key, info in tensors.infos.items():
        matrix, _, half = key.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        # llama.cpp has one alpha for all matrices
        scale = next((value for end, value in patterns.items() if matrix.endswith(end)), alpha) / alpha
        values = _values(bytes(tensors.tensor(key).data), info)
        values = form.in_order(f"{matrix}.", values) * scale if half == "B" else values
        written.append(_Tensor(f"{form.named(f'{matrix}.weight')}.lora_{half.lower()}", info, values.copy))
    _write(writer, written)


def modelfile(source: str, *, adapter: str = "", stops: Sequence[str] = ()) -> str:
    """Return a ``Modelfile`` of Ollama: the model or base model, an adapter, and the texts that end an answer."""
    lines = [
        f"FROM {source}",
        f"ADAPTER {adapter}" if adapter else "",
        *(f"PARAMETER stop {json.dumps(stop)}" for stop in stops),
    ]
    return "".join(f"{line}\n" for line in lines if line)


def _require_gguf() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise UsageError(f"GGUF needs the package 'gguf', which is not installed; {hint_to_install('gguf')}")


def _writer(target: Path, config: Mapping[str, Any]) -> GGUFWriter:
    from gguf import GGUFWriter

    return GGUFWriter(target, _architecture(config))


def _architecture(config: Mapping[str, Any]) -> str:
    return str(_ARCHITECTURES.get(config["model_type"], config["model_type"]))


def _add_facts(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    """Add what llama.cpp needs of the config."""
    from gguf import RopeScalingType

    size, types = model_dimensions(config), config.get("layer_types")
    window = sliding_window(config) if types is None or SLIDING in types else 0
    is_windowed = config["model_type"] in _HAS_WINDOWS
    writer.add_context_length(min(size.longest, window) if window and not is_windowed else size.longest)
    writer.add_embedding_length(size.hidden)
    writer.add_block_count(size.num_blocks)
    writer.add_feed_forward_length(size.inner)
    writer.add_head_count(size.num_heads)
    writer.add_vocab_size(size.vocab)
    if config["model_type"] == "gpt2":
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_head_count_kv(size.kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config["model_type"] == "granite":
        for key, fact in _GRANITE.items():
            writer.add_float32(f"granite.{fact}", config.get(key, 1.0))
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(size.head_width)
    if window and is_windowed:
        writer.add_sliding_window(window)
    for key, add_cap in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
    ):
        if config.get(key):
            add_cap(config[key])
    scaling = config.get("rope_scaling") or {}
    if (kind := rope_type(config)) in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling.get("original_max_position_embeddings") or size.longest)
        for key, add_yarn in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if scaling.get(key) is not None:
                add_yarn(scaling[key])


def _add_tokenizer(writer: GGUFWriter, folder: Path, template: str, *, vocab: int) -> None:
    """Add the tokens in the order of their ids, merges or scores, special tokens and the chat templates."""
    from gguf import SpecialVocab, TokenType

    whole, split = _read_tokenizer(folder)
    model, is_pieces = whole["model"], not split
    texts = {index: text for text, index in model.get("vocab", {}).items()}
    kinds = {
        index: TokenType.BYTE if is_pieces and _is_byte(text) else TokenType.NORMAL for index, text in texts.items()
    }
    if is_pieces and model.get("unk_token") in model["vocab"]:
        kinds[model["vocab"][model["unk_token"]]] = TokenType.UNKNOWN
    for added in whole.get("added_tokens", ()):
        texts[added["id"]] = added["content"] if added["special"] else added["content"].replace("\u2581", " ")
        if kinds.get(added["id"]) is not TokenType.UNKNOWN:
            kinds[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("llama" if is_pieces else "gpt2")
    writer.add_tokenizer_pre(split or "default")
    writer.add_token_list([texts.get(index, f"[PAD{index}]") for index in range(vocab)])
    writer.add_token_types([kinds.get(index, TokenType.UNUSED) for index in range(vocab)])
    if is_pieces:
        # a piece that an earlier merge makes has a higher score; what no merge makes is joined last
        ranks = {first + second: rank for rank, (first, second) in reversed(list(enumerate(_merges(model))))}
        writer.add_token_scores([-float(ranks.get(texts.get(index, ""), len(ranks))) for index in range(vocab)])
        writer.add_add_space_prefix(_has_prefix(whole))
    special = SpecialVocab(folder, load_merges=not is_pieces, n_vocab=vocab)
    templates = chat_templates(folder)
    if template:  # llama.cpp itself begins a text with the token that the tokenizer begins it with
        templates["default"] = template.replace(BEGIN, "")
    special.chat_template = [{"name": name, "template": text} for name, text in templates.items()] or None
    special.add_to_gguf(writer, quiet=True)


def _read_tokenizer(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the content of ``tokenizer.json``, and llama.cpp's name of how it splits a text; empty = into pieces.

    Raises ``UsageError``: llama.cpp has no tokenizer like it.
    """
    if not (folder / WHOLE_FILE).is_file():
        raise UsageError(
            f"the model has no {WHOLE_FILE}, which GGUF needs; save it with AutoTokenizer and export again"
        )
    whole = read_json(folder / WHOLE_FILE)
    is_of_pieces = whole["model"].get("type") == "BPE" and whole["model"].get("byte_fallback")
    return whole, "" if is_of_pieces else _split_name(whole)


def _is_byte(text: str) -> bool:
    return len(text) == len("<0x00>") and text.startswith("<0x") and text.endswith(">")


def _merges(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for merge in model.get("merges", ()):
        first, _, second = merge.partition(" ") if isinstance(merge, str) else (merge[0], "", merge[1])
        yield first, second


def _has_prefix(whole: Mapping[str, Any]) -> bool:
    """Whether a text begins with a space for the tokenizer."""
    steps = [*_steps(whole.get("normalizer"), "normalizers"), *_steps(whole.get("pre_tokenizer"), "pretokenizers")]
    return any(
        step["type"] == "Prepend" or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )


def _steps(part: Mapping[str, Any] | None, inside: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    return list(part[inside]) if part["type"] == "Sequence" else [part]


def _split_name(whole: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of how a byte-level tokenizer splits a text; raises ``UsageError``."""
    splits, problems = [], []
    for step in _steps(whole.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            splits.append(str(step["pattern"].get("Regex")))
        elif step["type"] == "Digits" and step.get("individual_digits"):
            splits.append("\\p{N}")
        elif step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
            splits += [GPT2_SPLIT] if step.get("use_regex", True) else []
        else:
            problems.append(str(step["type"]))
    normal = [str(step["type"]) for step in _steps(whole.get("normalizer"), "normalizers")]
    problems += [name for name in normal if name != "NFC"]
    model = whole["model"]
    name = SPLITS.get((tuple(splits), bool(model.get("ignore_merges"))))
    if model.get("type") != "BPE" or problems or name is None:
        raise UsageError(
            f"llama.cpp has no tokenizer like {WHOLE_FILE} of this model ({model.get('type')}, "
            f"{', '.join([*problems, *splits]) or 'nothing splits a text'}); use --format gguf-lora beside a GGUF of "
            "the base model, or --merge"
        )
    return name


class _Tensor(NamedTuple):
    """A tensor to write: its name in GGUF, its type and shape there, and how its values are read."""

    name: str
    info: TensorInfo
    read: Callable[[], Array]


class _Form(NamedTuple):
    """Names and order of a model's values in GGUF."""

    names: TensorNameMap
    model_type: str
    heads: int
    kv_heads: int

    @staticmethod
    def of(config: Mapping[str, Any]) -> _Form:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        size, name = model_dimensions(config), _architecture(config)
        kind = next(kind for kind, known in MODEL_ARCH_NAMES.items() if known == name)
        return _Form(get_tensor_name_map(kind, size.num_blocks), config["model_type"], size.num_heads, size.kv_heads)

    def named(self, key: str) -> str:
        """Return the name of a tensor in GGUF."""
        name: str | None = self.names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UsageError(f"llama.cpp has no place for {key} of {self.model_type}; use --format adapterhub or peft")
        return name

    def in_order(self, key: str, values: Array) -> Array:
        """Interleave the halves of each head, if these are outputs of query or key and llama.cpp has them so."""
        part = next((part for part in ("q", "k") if f".{part}_proj." in key), "")
        if self.model_type not in INTERLEAVED or not part:
            return values
        heads = self.heads if part == "q" else self.kv_heads
        halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)

    def stored(self, key: str, values: Array) -> Array:
        """Return values as GGUF has them."""
        if self.model_type in ADDS_ONE and key.endswith("norm.weight"):
            return values + 1
        return values.T if self.is_transposed(key, values.shape) else self.in_order(key, values)

    def is_transposed(self, key: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor is a matrix that GPT-2 has with inputs first."""
        return self.model_type == "gpt2" and len(shape) == 2 and ".h." in f".{key}"


def _tensors(folder: Path, config: Mapping[str, Any]) -> Iterator[_Tensor]:
    import numpy as np

    form = _Form.of(config)
    for key, stored in read_headers(folder).items():
        if key.endswith(NO_WEIGHTS) or (key.startswith("lm_head.") and config["tie_word_embeddings"]):
            continue

        def read(key: str = key, path: Path = stored.path, info: TensorInfo = stored.info) -> Array:
            with path.open("rb") as file:
                file.seek(info.offset)
                return form.stored(key, _values(file.read(info.nbytes), info))

        shape = stored.shape[::-1] if form.is_transposed(key, stored.shape) else stored.shape
        yield _Tensor(form.named(key), stored.info._replace(shape=shape), read)
    if rope_type(config) == "llama3":
        factors = rope_factors(config["rope_scaling"], width=head_width(dict(config)), base=config["rope_theta"])
        info = TensorInfo("F32", (len(factors),), 4 * len(factors), 0)
        yield _Tensor("rope_freqs.weight", info, functools.partial(np.array, factors, np.float32))


def _values(content: bytes, info: TensorInfo) -> Array:
    """Return the values of a tensor; of bfloat16 the bits, but float32 if it is a vector, or float64."""
    import numpy as np

    kinds = {"F32": np.float32, "F64": np.float64, "F16": np.float16, "BF16": np.uint16}
    values = np.frombuffer(content, kinds[info.dtype]).reshape(info.shape)
    if info.dtype == "BF16" and len(info.shape) == 1:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if len(info.shape) == 1 or info.dtype == "F64" else values


def _write(writer: GGUFWriter, tensors: list[_Tensor]) -> None:
    """Write header, facts and tensors; each tensor is read when it is written."""
    import numpy as np
    from gguf import GGMLQuantizationType as Kind

    kinds = {"F32": Kind.F32, "F64": Kind.F32, "F16": Kind.F16, "BF16": Kind.BF16}
    for tensor in tensors:
        shape = tensor.info.shape
        kind = Kind.F32 if len(shape) == 1 else kinds[tensor.info.dtype]
        nbytes = math.prod(shape) * (4 if kind is Kind.F32 else 2)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(np.ascontiguousarray(tensor.read()))
    writer.close()

"""stories15M as llama2.c keeps it, made into a folder that transformers loads.

The file is a header of seven 32-bit integers, all weights as float32, then the tokenizer. Two things differ from
transformers:

* Rotary positions turn neighbours (0, 1), (2, 3), ... of a head in llama2.c, and (0, d/2), (1, d/2 + 1), ... in
  transformers. Scores do not change if the rows of queries and keys are put in the other order.
* Its tokenizer has a score for each piece and joins the best-scored pair first; here the same as a list of merges.

Source: karpathy/llama2.c, ``run.c`` (``memory_map_weights``, ``build_tokenizer``, ``encode``).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringtune.errors import ModelError
from ringtune.storage.durable import write_durably

Array = np.ndarray[Any, np.dtype[np.float32]]

_HEADER = struct.Struct("<7i")
_PIECE = struct.Struct("<fi")
_SPECIAL = ("<unk>", "<s>", "</s>")
_FIRST_WORD = len(_SPECIAL) + 256
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """Sizes of the model, in the file's order; the token table is also the decoder."""

    width: int
    inner: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    vocab: int
    context: int

    @property
    def head_width(self) -> int:
        """Of one attention head."""
        return self.width // self.num_heads

    def config(self) -> dict[str, object]:
        """``config.json`` of the same model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.num_blocks,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "max_position_embeddings": self.context,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "float32",
        }

    def layout(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes in the file's order."""
        blocks, width, inner, keys = self.num_blocks, self.width, self.inner, self.num_kv_heads * self.head_width
        return {
            "table": (self.vocab, width),
            "attention_norm": (blocks, width),
            "q": (blocks, width, width),
            "k": (blocks, keys, width),
            "v": (blocks, keys, width),
            "o": (blocks, width, width),
            "mlp_norm": (blocks, width),
            "gate": (blocks, inner, width),
            "down": (blocks, width, inner),
            "up": (blocks, inner, width),
            "norm": (width,),
            "cosines": (self.context, self.head_width // 2),
            "sines": (self.context, self.head_width // 2),
        }


class Piece(NamedTuple):
    """One word of the vocabulary."""

    text: str
    score: float


def convert(source: Path, folder: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer; the same bytes each time.

    Raises:
        ModelError: the file is not of this form.
        StorageError: the folder can't be written.
    """
    from safetensors.numpy import save

    data = source.read_bytes()
    header = read_header(data)
    weights, end = read_weights(data, header)
    pieces = read_pieces(data[end:], header.vocab)
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors_of(weights, header).items()}
    write_durably(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    write_durably(folder / "tokenizer.json", tokenizer_of(pieces).encode())
    for name, content in (("config.json", header.config()), ("tokenizer_config.json", _tokenizer_config(header))):
        write_durably(folder / name, (json.dumps(content, indent=2) + "\n").encode())


def read_header(data: bytes) -> Header:
    """The sizes.

    Raises:
        ModelError: they are not those of a model whose decoder is its token table.
    """
    names = tuple(Header.__dataclass_fields__)
    values = _HEADER.unpack_from(data) if len(data) >= _HEADER.size else (0,) * len(names)
    header = Header(**dict(zip(names, values, strict=True)))
    if min(values) < 1 or header.width % header.num_heads or header.head_width % 2:
        raise ModelError(f"the file begins with {values}, which are no sizes of a llama2.c model; fetch it again")
    return header


def read_weights(data: bytes, header: Header) -> tuple[dict[str, Array], int]:
    """All weights, and where they end.

    Raises:
        ModelError: the file is too short.
    """
    weights: dict[str, Array] = {}
    at = _HEADER.size
    for name, shape in header.layout().items():
        count = int(np.prod(shape))
        if at + 4 * count > len(data):
            raise ModelError(f"the file ends within {name!r} at {len(data)} bytes; fetch it again")
        weights[name] = np.frombuffer(data, "<f4", count, at).reshape(shape)
        at += 4 * count
    return weights, at


def halves(weight: Array, num_heads: int) -> Array:
    """Rows of queries or keys, head by head: first those with even numbers, then those with odd ones."""
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(rows, width)


def tensors_of(weights: Mapping[str, Array], header: Header) -> dict[str, Array]:
    """Weights by their names in transformers."""
    tensors = {"model.embed_tokens.weight": weights["table"], "model.norm.weight": weights["norm"]}
    names = {
        "input_layernorm": "attention_norm",
        "self_attn.v_proj": "v",
        "self_attn.o_proj": "o",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "gate",
        "mlp.down_proj": "down",
        "mlp.up_proj": "up",
    }
    for block in range(header.num_blocks):
        prefix = f"model.layers.{block}."
        tensors |= {f"{prefix}{name}.weight": weights[stored][block] for name, stored in names.items()}
        tensors[f"{prefix}self_attn.q_proj.weight"] = halves(weights["q"][block], header.num_heads)
        tensors[f"{prefix}self_attn.k_proj.weight"] = halves(weights["k"][block], header.num_kv_heads)
    return tensors


def read_pieces(data: bytes, count: int) -> list[Piece]:
    """The vocabulary: the length of its longest piece, then score, length and bytes of each.

    Raises:
        ModelError: the file is too short.
    """
    at, pieces = 4, []
    for index in range(count):
        if at + _PIECE.size > len(data):
            raise ModelError(f"the tokenizer ends after {index} of {count} pieces; fetch the file again")
        score, length = _PIECE.unpack_from(data, at)
        text = data[at + _PIECE.size : at + _PIECE.size + length].decode("utf-8", "replace")
        at += _PIECE.size + length
        pieces.append(Piece(_text_of(index, text), score))
    return pieces


def _text_of(index: int, text: str) -> str:
    if index < len(_SPECIAL):
        return _SPECIAL[index]
    if index < _FIRST_WORD:
        return f"<0x{index - len(_SPECIAL):02X}>"
    return text.replace(" ", _SPACE)


def merges_of(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Every way to join two pieces to a third, the best-scored result first."""
    places = {piece.text: index for index, piece in enumerate(pieces)}
    merges = []
    for text, score in pieces[_FIRST_WORD:]:
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in places and right in places:
                merges.append((-score, places[left], places[right], (left, right)))
    return [pair for *_, pair in sorted(merges)]


def tokenizer_of(pieces: Sequence[Piece]) -> str:
    """``tokenizer.json``: a space before the text, unknown characters as bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {piece.text: index for index, piece in enumerate(pieces)}
    unknown = _SPECIAL[0]
    model = models.BPE(vocab=vocabulary, merges=merges_of(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(list(_SPECIAL))
    return str(tokenizer.to_str())


def _tokenizer_config(header: Header) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": _SPECIAL[0],
        "bos_token": _SPECIAL[1],
        "eos_token": _SPECIAL[2],
        "pad_token": _SPECIAL[0],
        "model_max_length": header.context,
        "clean_up_tokenization_spaces": False,
    }

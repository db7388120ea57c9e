"""Which tensors a model consists of, and where each lies: in one safetensors file, or in several with an index.

Only headers are read. The index is not trusted: it may name files of the folder only, and what it says has to be
in them. The config is not trusted either: the header has to have what it means.

Source: the layouts that ``save_pretrained`` writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ringtune.errors import ModelError
from ringtune.files.given_files import read_json
from ringtune.files.safetensors_header import TensorInfo, read_safetensors_header
from ringtune.models.families import FAMILIES
from ringtune.models.family import LM_HEAD, Family, Shapes

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "preprocessor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""What an owner may need beside the weights to turn its rows into tensors."""

MODEL_SIDE_FILES = ("generation_config.json", *TOKENIZER_FILES)
"""Every file beside config and weights that the folder of a trained model takes over from its base."""

SAMPLE_BYTES = 64
"""Bytes of each tensor's middle that stand for its values."""

_MAX_INDEX_BYTES = 20_000_000
_LEGACY_ENDS = {".gamma": ".weight", ".beta": ".bias"}  # LayerNorm names of the first BERT files
# What old files hold besides weights, because the library saved it once; and a token for training of another kind.
_NO_WEIGHTS = (".position_ids", ".token_type_ids", ".attn.bias", ".attn.masked_bias", ".inv_freq", ".mask_token")


class StoredTensor(NamedTuple):
    """A tensor's header entry and the file that it is in."""

    path: Path
    info: TensorInfo

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.info.shape

    def sample(self) -> bytes:
        """Read a few bytes of the tensor's middle, where two trainings of one architecture differ."""
        with self.path.open("rb") as file:
            file.seek(self.info.offset + sample_start(self.info.nbytes))
            return file.read(min(SAMPLE_BYTES, self.info.nbytes))


def sample_start(nbytes: int) -> int:
    """The offset in a tensor of ``nbytes`` at which its sample begins.

    Example: 468 in 1,000 bytes, because the sample is the middle 64.
    """
    return max(0, nbytes - SAMPLE_BYTES) // 2


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by its name in the file.

    Raises:
        ModelError: no safetensors file, or an index that is not readable or does not fit its files.
        IntegrityError: a file is damaged.
    """
    path = folder / WEIGHTS_FILE
    if path.is_file():
        return {name: StoredTensor(path, info) for name, info in read_safetensors_header(path).items()}
    if not (folder / INDEX_FILE).is_file():
        raise ModelError(_no_weights(folder))
    file_of = _read_index(folder / INDEX_FILE)
    headers = {file: read_safetensors_header(folder / file) for file in sorted(set(file_of.values()))}
    for name, file in file_of.items():
        if name not in headers[file]:
            raise ModelError(f"{folder / file} has no tensor {name!r}, which {INDEX_FILE} says; fetch the model again")
    return {name: StoredTensor(folder / file, headers[file][name]) for name, file in file_of.items()}


def shard_name(number: int, count: int) -> str:
    """The name of one of several weight files, the first of them with number 1.

    Example: ``model-00002-of-00003.safetensors``.
    """
    return f"model-{number:05}-of-{count:05}.safetensors"


def base_name(name: str, family: Family) -> str:
    """The name in the base model of a file's tensor: without prefix, with today's ending.

    Example: BERT's ``bert.embeddings.LayerNorm.gamma`` is ``embeddings.LayerNorm.weight``.
    """
    name = name.removeprefix(family.prefix)
    for old, new in _LEGACY_ENDS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def select_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    *,
    where: str,
    blocks: Iterable[int],
    is_owner: bool,
    with_decoder: bool,
) -> list[str]:
    """Names of the base model's tensors in some blocks and at an owner, compared with the config.

    What a header has inside one block, every block has to have, in the same shape. A task head, and what is no
    weight, is left out; so is a decoder that is tied to the token table, because it is that table.

    Args:
        shapes: by name in the base model, from headers.
        config: from ``read_config``.
        where: the model, for messages.
        blocks: indices.
        is_owner: also what an owner holds besides blocks.
        with_decoder: an owner's head is the pretrained decoder.

    Raises:
        ModelError: a tensor is missing, or has another shape than the config means.
    """
    family = FAMILIES[config["model_type"]]
    weights = {name: shape for name, shape in shapes.items() if not name.endswith(_NO_WEIGHTS)}
    inside = dict(family.block_shapes(config))
    for name, shape in weights.items():
        if name.startswith(family.block_prefix):
            inside.setdefault(name.removeprefix(family.block_prefix).partition(".")[2], shape)
    wanted: Shapes = {
        f"{family.block_prefix}{block}.{name}": shape for block in blocks for name, shape in inside.items()
    }
    if is_owner:
        own = tuple(f"{path}." for path in family.owner_paths)
        wanted |= {name: shape for name, shape in weights.items() if name.startswith(own)} | family.owner_shapes(config)
        if with_decoder and not config["tie_word_embeddings"]:
            dimensions = family.dimensions(config)
            wanted[LM_HEAD] = (dimensions.vocab, dimensions.hidden)
    for name, shape in wanted.items():
        if name not in shapes:
            raise ModelError(f"{where} has no tensor {name!r}, which {CONFIG_FILE} asks for; is the model complete?")
        if shapes[name] != shape:
            raise ModelError(f"{where}: tensor {name!r} has shape {shapes[name]}, {CONFIG_FILE} means {shape}")
    return list(wanted)


def _read_index(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise ModelError(f"{path} has {path.stat().st_size:,} bytes, an index has {_MAX_INDEX_BYTES:,} at most")
        weight_map = read_json(path)["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is not a readable index ({error!r}); fetch the model again") from error
    for file in files.values():
        if Path(file).name != file or file in ("", ".", ".."):
            raise ModelError(f"{path} names the file {file!r}, which is not in the folder; fetch the model again")
    return files


def _no_weights(folder: Path) -> str:
    if any(folder.glob("*.bin")):
        return f"{folder} has pickled weights only, which are never opened; save them as {WEIGHTS_FILE}"
    return f"{folder} has no {WEIGHTS_FILE}; give a folder that has one, saved with safe_serialization=True"

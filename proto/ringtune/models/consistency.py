"""Hold the files of a model folder against each other: tokenizer, preprocessor, a head's classes against the config.

Other weights are held against the config by ``ringtune.models.tensors``. A folder that was put together of two models,
or a token that was added without a row for it, would otherwise end a run at the first batch that has it. Tokens that no
text has to have may be beyond the table, as in Gemma 3, whose tokenizer knows pictures too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ringtune.errors import ModelError
from ringtune.files.given_files import read_given, read_json
from ringtune.models.folder import model_dimensions
from ringtune.models.tensors import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, read_headers

_WHOLE: Final = "tokenizer.json"
_LISTS: Final = ("vocab.txt", "vocab.json")
_SETTINGS: Final = ("tokenizer_config.json", "special_tokens_map.json")
_PREPROCESSOR: Final = "preprocessor_config.json"
_HEADS: Final = ("classifier.weight", "classifier.out_proj.weight", "score.weight")
_NAMED: Final = ("pad_token", "bos_token", "eos_token", "unk_token", "cls_token", "sep_token")


class _Tokens(NamedTuple):
    """What the files of a tokenizer say.

    Attributes:
        ids: number of each token of its vocabulary.
        added: of each that was added to it.
        around: of each that is put around every text.
    """

    ids: Mapping[str, int]
    added: Mapping[str, int]
    around: Mapping[str, int]

    def __len__(self) -> int:
        """Number of tokens."""
        return 1 + max([*self.ids.values(), *self.added.values()], default=-1)


def check_files(folder: str | Path, config: Mapping[str, Any]) -> None:
    """Refuse files of a model folder that do not belong together; files that are missing are not looked for.

    Args:
        folder: of the model.
        config: from ``read_config``.

    Raises:
        ModelError: names both files and both numbers.
        IntegrityError: a file of weights is damaged.
    """
    vocab = model_dimensions(config).vocab
    if vocab:
        _check_tokens(Path(folder), vocab)
    else:
        _check_pictures(Path(folder), config)
    _check_classes(Path(folder))


def _check_classes(folder: Path) -> None:
    """Refuse weights whose head has another number of classes than the config names.

    The head itself is made anew for the classes of the job; but one of the two files is of another model.
    """
    if not any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)):
        return
    values = read_json(folder / CONFIG_FILE)
    named = values.get("id2label") if isinstance(values, dict) else None
    if not isinstance(named, dict):
        return
    for name, stored in read_headers(folder).items():
        if name in _HEADS and stored.shape[0] != len(named):
            raise ModelError(
                f"{folder}: tensor {name} of {stored.path.name} has {stored.shape[0]} classes, id2label of "
                f"{CONFIG_FILE} has {len(named)}; take both files of one model"
            )


def _check_tokens(folder: Path, vocab: int) -> None:
    """Refuse a tokenizer of which tokens that texts have are beyond the table of the embedding."""
    tokens = _tokens(folder)
    if tokens is None:
        return
    used = {**tokens.ids, **tokens.around, **dict(_named(folder, tokens))}
    token = max(used, key=used.__getitem__, default="")
    if token and used[token] >= vocab:
        count = max(len(tokens), used[token] + 1)
        raise ModelError(
            f"{folder}: the tokenizer has {count:,} tokens, the embedding {vocab:,} rows (vocab_size of config.json), "
            f"and {token!r} is token {used[token]:,}, counted from 0; take the tokenizer that belongs to the model, or "
            f"enlarge the embedding: model.resize_token_embeddings({count}) and save both"
        )


def _tokens(folder: Path) -> _Tokens | None:
    """Read the tokens of the first file that has them; None if no such file is there."""
    name = next((name for name in (_WHOLE, *_LISTS) if (folder / name).is_file()), None)
    if name is None:
        return None
    status = (folder / name).stat()
    return _tokens_of(folder / name, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=4)
def _tokens_of(path: Path, changed_ns: int, size_bytes: int) -> _Tokens:
    """Read a file of tokens, once as long as it does not change; one that is damaged is refused where it is loaded."""
    try:
        if path.name == "vocab.txt":
            lines = read_given(path).splitlines()
            return _Tokens({token: index for index, token in enumerate(lines)}, {}, {})
        found = read_json(path)
        if path.name != _WHOLE:
            return _Tokens(dict(found), {}, {})
        vocabulary = found["model"]["vocab"]
        if isinstance(vocabulary, list):  # of a unigram model: tokens with their scores
            vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
        added = {str(token["content"]): int(token["id"]) for token in found.get("added_tokens") or ()}
        return _Tokens(dict(vocabulary), added, dict(_around(found.get("post_processor"))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _Tokens({}, {}, {})


def _around(processor: Any) -> Iterator[tuple[str, int]]:
    """Yield the tokens that a post-processor puts around every text, with their numbers."""
    if not isinstance(processor, dict):
        return
    for part in processor.get("processors") or ():
        yield from _around(part)
    for token, entry in (processor.get("special_tokens") or {}).items():
        yield from ((str(token), int(number)) for number in entry["ids"])
    for key in ("cls", "sep"):
        if isinstance(pair := processor.get(key), list):
            yield str(pair[0]), int(pair[1])


def _named(folder: Path, tokens: _Tokens) -> Iterator[tuple[str, int]]:
    """Yield the tokens that the settings name; one that the tokenizer has not yet is put behind all others."""
    for name in _SETTINGS:
        path = folder / name
        try:
            found = read_json(path) if path.is_file() else {}
            entries = [found.get(key) for key in _NAMED]
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{path} is not JSON that can be read ({error}); fetch the model again") from error
        for entry in entries:
            token = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(token, str) and token:
                yield token, tokens.added.get(token, tokens.ids.get(token, len(tokens)))


def _check_pictures(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a preprocessor that makes pictures of another size than the model takes."""
    path = folder / _PREPROCESSOR
    try:
        found = read_json(path) if path.is_file() else {}
        crops = bool(found.get("do_center_crop"))
        size = found.get("crop_size" if crops else "size")
        resizes = crops or bool(found.get("do_resize"))
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} is not JSON that can be read ({error}); fetch the model again") from error
    side = config["image_size"]
    sides = (size.get("height"), size.get("width")) if isinstance(size, dict) else (size, size)
    if resizes and all(isinstance(value, int) for value in sides) and sides != (side, side):
        raise ModelError(
            f"{folder}: {_PREPROCESSOR} makes pictures of {sides[0]} x {sides[1]} pixels, config.json has image_size "
            f"{side}; make them equal"
        )

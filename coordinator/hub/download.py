"""``python -m coordinator.hub.download OWNER/NAME REVISION CACHE``: fetch the files of a model into a cache.

A process of its own, so that a network that hangs has a deadline. Only configuration, safetensors and the tokenizer
are fetched: no pickled weights, and no code.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, Final

FILES: Final = (
    *("config.json", "generation_config.json", "preprocessor_config.json"),
    *("model.safetensors", "model.safetensors.index.json", "model-*.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "sentencepiece.bpe.model", "spiece.model"),
)
"""Names of what is fetched; all else stays where it is."""

_ANSWER_S = 20.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch; return the exit code."""
    repository, revision, cache = sys.argv[1:] if arguments is None else arguments
    try:
        library: Any = importlib.import_module("huggingface_hub")
        library.snapshot_download(
            repository, revision=revision, cache_dir=cache, allow_patterns=list(FILES), etag_timeout=_ANSWER_S
        )
    except Exception as error:  # of the network, the hub and the disk alike; the last line is shown
        text = " ".join(str(error).split()) or type(error).__name__
        sys.stderr.write(f"{type(error).__name__}: {text}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

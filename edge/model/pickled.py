"""Convert pickled files of tensors to safetensors: ``python -m edge.model.pickled FILE TARGET [FILE TARGET ...]``.

AdapterHub's default format is pickled. Only tensors are accepted: nothing of the file is executed. It is a process of
its own, because the coordinator loads no torch.

Source: ``torch.load`` with ``weights_only=True``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edge.model.tensor_files import pieces_of
from ringtune.errors import DataError, InvalidInputError
from ringtune.machine.process import exit_code_of
from ringtune.storage.tensor_files import write_tensors
from ringtune.storage.text_files import check_archive, is_archive

_SLACK_BYTES: Final = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert each file; return the exit code, of the first that can't be."""
    paths = [Path(path) for path in (sys.argv[1:] if arguments is None else arguments)]

    def work() -> None:
        for source, target in zip(paths[::2], paths[1::2], strict=True):
            convert(source, target)

    return exit_code_of(work)


def convert(source: Path, target: Path) -> None:
    """Write the tensors of a file of ``torch.save`` to a new safetensors file; raises ``InvalidInputError``."""
    import torch

    try:
        if is_archive(source):  # torch reads packed parts too
            check_archive(source, "save it with torch.save", most_bytes=_SLACK_BYTES, factor=2)
        loaded = torch.load(source, map_location="cpu", weights_only=True)
    except DataError:
        raise
    except Exception as error:  # of a damaged file torch's reader may raise anything
        reason = str(error).splitlines()[0]
        raise InvalidInputError(f"{source.name} has more than tensors, or is damaged ({reason})") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise InvalidInputError(f"{source.name} has more than tensors by name")
    if (
        sum(value.numel() * value.element_size() for value in loaded.values())
        > 2 * source.stat().st_size + _SLACK_BYTES
    ):
        raise InvalidInputError(f"{source.name} has tensors larger than the file: views of a few numbers")
    with target.open("xb") as file:
        for piece in write_tensors({str(name): pieces_of(value) for name, value in loaded.items()}):
            file.write(piece)


if __name__ == "__main__":
    sys.exit(main())

"""What a model folder says about itself, read without torch and without trusting it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ringtune.job_values import Job
from ringtune.profile import ModelFacts


class TensorInfo(NamedTuple):
    """One tensor of a safetensors file, from its header."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_config(folder: str | Path) -> dict[str, Any]:
    """The allowed keys of ``config.json``.

    Raises:
        ModelError: no folder, no file, not JSON, a family that is not supported, or a key that would load code.
    """
    raise NotImplementedError


def read_safetensors_header(path: str | Path) -> dict[str, TensorInfo]:
    """Names, types and shapes of a safetensors file, without reading a tensor.

    Raises:
        ModelError: there is no such file.
        IntegrityError: truncated, or the header contradicts itself or the file's size.
    """
    raise NotImplementedError


def model_facts(folder: str | Path, job: Job) -> ModelFacts:
    """Sizes of the model in ``folder`` with the job's adapters, in the job's compute dtype.

    Raises:
        ModelError: not a folder of a supported family, a tensor is missing or has another shape.
        IntegrityError: the safetensors file is damaged.
    """
    raise NotImplementedError

"""Tiny models that the tests of this folder read and never change, each written once a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import tiny, tiny_families


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of four blocks with its tokenizer."""
    return tiny.write_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that writes the model of a family, of two blocks."""
    root = tmp_path_factory.mktemp("families")
    return functools.cache(lambda name: tiny_families.write_family(root / name, name, num_blocks=2))

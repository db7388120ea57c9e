"""Tiny models that the tests of this folder read and never change, and templates without a process for each."""

from __future__ import annotations

import functools
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.data import chat_template
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


@pytest.fixture
def templates_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render chat templates in this process, without limits of time and memory; ``test_chat_template`` has them."""

    def run(command: list[str], *, input: bytes, **_: Any) -> subprocess.CompletedProcess[bytes]:  # noqa: A002
        written = io.BytesIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input), encoding="utf-8"))
            patch.setattr(sys, "stdout", SimpleNamespace(buffer=written))
            patch.setattr("edge.data.chat_template.resource.setrlimit", lambda *_: None)
            patch.setattr(chat_template, "die_with_parent", lambda _: True)
            code = chat_template.main()
        return subprocess.CompletedProcess(command, code, written.getvalue(), b"")

    module = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(chat_template, "subprocess", module)

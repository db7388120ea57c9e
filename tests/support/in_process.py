"""Modules of RingTune that the product starts as processes, called in the process of the tests.

A process of its own loads torch anew, in seconds. What it prints and returns is the same.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def calling(module: ModuleType) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return what stands in for ``subprocess.run`` where ``python -P -m MODULE ARGUMENTS`` is started."""

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[3] == module.__name__
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            code = module.main(command[4:])
        return subprocess.CompletedProcess(command, code, "", errors.getvalue())

    return run

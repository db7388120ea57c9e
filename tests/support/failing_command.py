"""``ringtune coordinator`` with failpoints: ``python -m tests.support.failing_command coordinator ...``."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from tests.support import failpoints

if __name__ == "__main__":
    failpoints.arm("coordinator", Path(os.environ[failpoints.VARIABLE]))
    runpy.run_module("ringtune.cli", run_name="__main__", alter_sys=True)

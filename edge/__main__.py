"""Run ``ringtune node`` as ``python -m edge``, without the commands of the other packages."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from edge.cli.node import app
from ringtune.errors import RingTuneError
from ringtune.machine.process import guard_outputs, mark_command_process
from ringtune.texts import log_to_stderr


def main() -> int:
    """Run an agent; return the exit code."""
    mark_command_process()
    guard_outputs()
    level = os.environ.get("RINGTUNE_LOG", "WARNING").upper()
    log_to_stderr(level)
    try:
        app(prog_name="python -m edge")
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except RingTuneError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def end(code: int) -> NoReturn:
    """End this process at once: taking torch's modules apart would cost up to a second of every local run."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main())

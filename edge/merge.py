"""``python -m edge.merge RUN OUT``: write the model of a run with its adapter merged; ``ringtune export --merge`` does.

It is a process of its own, because what is exported is put together without torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ringtune.errors import InvalidInputError, RingTuneError
from ringtune.files.durable import write_pieces_durably
from ringtune.jobs.job import load_job
from ringtune.jobs.result import result_of
from ringtune.schedule.plan_0_1 import read_any_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the run, merge, write; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m edge.merge", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("out", type=Path, help="folder to write; it has to be there")
    parser.add_argument("--model", type=Path, help="folder of the base model; replaces the run's model.path")
    given = parser.parse_args(arguments)
    try:
        merge_run(given.run, given.out, model=given.model)
    except RingTuneError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def merge_run(run: Path, out: Path, *, model: Path | None) -> None:
    """Write the merged model of a run.

    Args:
        run: its folder.
        out: folder that takes the files.
        model: of the base model; None = the run's own.

    Raises:
        RingTuneError: see ``edge.model.result.merged.merged_files``.
    """
    job = load_job(run / "job.toml", is_record=True)
    plan = read_any_plan(json.loads((run / "plan.json").read_text(encoding="utf-8")))
    base = model or Path(job.model.path)
    if not base.is_dir():
        raise InvalidInputError(f"the base model {base} is not there; name its folder with --model")

    from edge.model.result.merged import merged_files

    for name, content in merged_files(job, base, run / result_of(job).folder, plan.course.labels).items():
        write_pieces_durably(out / name, content)


if __name__ == "__main__":
    sys.exit(main())

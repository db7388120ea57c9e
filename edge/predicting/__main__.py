"""``python -m edge.predicting JOB SAVED DATA``: print a JSON object for each row; ``ringtune predict`` starts it.

It is a process of its own, because commands are put together without torch. A row is read, predicted and printed before
many others are read, so that its memory does not grow with the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ringtune.errors import DataError, RingTuneError
from ringtune.jobs.job import Job, load_job
from ringtune.machine.cores import usable_cores
from ringtune.models.family import CAUSAL_LM


def main(arguments: Sequence[str] | None = None) -> int:
    """Load the model, predict and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m edge.predicting", description=__doc__)
    parser.add_argument("job", type=Path, help="job file, with the names of the classes")
    parser.add_argument("saved", type=Path, help="folder of an adapter or model")
    parser.add_argument("data", type=Path, help="rows")
    parser.add_argument("--max-new-tokens", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        for line in predictions(load_job(given.job), given):
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    except BrokenPipeError:
        return 1
    except RingTuneError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def predictions(job: Job, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield each row with what is predicted for it; as ``told`` settings that are not used, and how many were cut.

    Raises:
        RingTuneError: model or rows can't be used.
    """
    import torch

    from edge.data.tokens import NoTokenError
    from edge.predicting.generating import Sampling
    from edge.predicting.tasks import PREDICTORS, unused_settings
    from edge.predicting.whole import WholeModel

    torch.set_num_threads(job.runtime.threads or usable_cores())
    sampling = Sampling(max_new_tokens=given.max_new_tokens, temperature=given.temperature, seed=given.seed)
    model = WholeModel(job, given.saved, job.data.labels)
    predictor = PREDICTORS[job.model.task](model, job, sampling)
    if job.model.task == CAUSAL_LM and (note := unused_settings(Path(job.model.path))):
        yield {"told": note}
    rows, first = predictor.rows(given.data), 0
    at_once = 1 if job.model.task == CAUSAL_LM else job.train.batch_size  # texts go on one by one in any case
    while taken := list(itertools.islice(rows, at_once)):
        try:
            found = predictor.predict([value for _, value in taken], first)
        except NoTokenError as error:
            raise DataError(f"{given.data}, row {first + error.row + 1}: {error.what}") from error
        for (row, _), said in zip(taken, found, strict=True):
            yield {"row": dict(row), "predicted": said}
        first += len(taken)
    if predictor.cut_rows:
        yield {"told": f"{predictor.cut_rows:,} of {first:,} rows are longer than a row may be and were cut"}
    if not first:
        raise DataError(f"{given.data} has no rows; give it rows to predict for")


if __name__ == "__main__":
    sys.exit(main())

"""A few words of a language model that was just trained, from the user's own prompt (``train.sample_prompt``).

Prediction is that of ``ringtune predict``, on this machine. The run is done whatever comes of it: without the base
model here there is no sample, and a line says why.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Final

from coordinator.predicting.of_run import predict_rows
from coordinator.predicting.process import Sampling
from coordinator.run_folder.saved_run import read_json, read_run
from coordinator.screen.progress import Progress
from ringtune.errors import RingTuneError
from ringtune.files.durable import write_durably
from ringtune.jobs.job import Job

HOW: Final = Sampling(max_new_tokens=40)
"""Always the likeliest token, so that two results can be compared by their samples."""


def show_sample(job: Job, folder: Path, progress: Progress) -> None:
    """Show what a trained language model says after the job's prompt, if it has one; the report gets it too.

    Args:
        job: of the run.
        folder: of the run, which is done.
        progress: where it is shown.
    """
    if not job.train.sample_prompt:
        return
    try:
        sample = _sample(job.train.sample_prompt, folder)
        report = folder / "report.json"
        write_durably(report, (json.dumps({**read_json(report), "sample": sample}, indent=1) + "\n").encode())
    except RingTuneError as error:
        progress.note(f"no sample of text: {error}; 'ringtune predict' makes one where the base model is")
        return
    progress.note(f"sample of text, {sample['tokens']} tokens after train.sample_prompt:")
    for line in (sample["prompt"] + sample["text"]).splitlines():
        progress.note(f"  {line}")


def _sample(prompt: str, folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ringtune-") as name:
        run, rows = read_run(folder), Path(name) / "prompt.jsonl"
        rows.write_text(json.dumps({run.job.data.text: prompt}) + "\n", encoding="utf-8")
        (found,) = predict_rows(run, rows, HOW)
    return {"prompt": prompt, "text": str(found.said["predicted"]), "tokens": int(found.said["tokens"])}

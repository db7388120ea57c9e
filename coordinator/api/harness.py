"""``ringtune eval --harness``: figures of a trained language model by the tasks of lm-eval.

A process with torch and lm-eval computes on this machine (``edge.runtime.harness``); it is not loaded here.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coordinator.api.text_process import LineProcess, command_of
from coordinator.api.user_adapters import adapter_of, require_user
from coordinator.client.saved_run import SavedRun, evaluation_job
from ringtune.errors import IntegrityError, UsageError
from ringtune.hints import hint_to_install
from ringtune.models.family import LANGUAGE_TASKS

Figures = Mapping[str, Mapping[str, Any]]
SILENCE_S: Final = 3600.0
"""Longest time between two requests; data sets may be fetched before the first one."""


def harness(
    run: SavedRun,
    tasks: Sequence[str],
    *,
    data: Path | None = None,
    model: Path | None = None,
    user: str = "",
    apply_chat_template: bool = False,
    tell: Callable[[str], object] = str,
) -> Figures:
    """Return the figures of a run by the names of lm-eval's tasks.

    ``data`` is a folder with tasks of one's own, and with the files that they name; ``model`` replaces the run's folder
    of the model; with ``apply_chat_template`` contexts are conversations in the run's template; ``tell`` gets a line
    after the 1st, 10th, 100th, ... request.

    Raises:
        UsageError: lm-eval is not installed, the run's model writes no text, or an argument is wrong.
        RingTuneError: the error of the process.
    """
    if run.job.model.task not in LANGUAGE_TASKS:
        raise UsageError(f"--harness is for language models, {run.folder} learned {run.job.model.task}; leave it out")
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(f"--harness needs lm-eval, not installed here; {hint_to_install('harness')}")
    if not tasks or not all(name and name.isprintable() and "," not in name for name in tasks):
        raise UsageError("--harness has no tasks; name some of lm-eval's, with a comma between them")
    if data is not None and not data.is_dir():
        raise UsageError(f"--harness-data {data} is no folder; give one with tasks of lm-eval")
    require_user(run, user)
    with tempfile.TemporaryDirectory(prefix="ringtune-") as name, adapter_of(run, user) as chosen:
        words = [",".join(tasks), *([str(data.resolve())] if data else [])]
        words += ["--apply-chat-template"] if apply_chat_template else []
        job = evaluation_job(chosen, None, model=model)
        command = command_of("harness", chosen, job, Path(name), *words)
        late = f"no request of lm-eval was done within {SILENCE_S:g} s; take a smaller task, or a faster machine"
        figures: Figures = {}
        with LineProcess("the evaluation", command, Path(name) / "log") as process:
            for line in process.lines(SILENCE_S, late):
                figures = line.get("tasks", figures)
                if "done" in line and str(line["done"]).strip("0") == "1":
                    tell(f"lm-eval: {line['done']:,} requests")
        if not figures:
            raise IntegrityError("lm-eval ended without figures; look whether code of a task ends the process")
        return figures


def lines_of(figures: Figures) -> Iterator[str]:
    """Write the figures, those of a task in one line; an error beside its figure, and the number of rows at the end.

    A figure that is no finite number is a dash.

    Example: ``{"piqa": {"sample_len": 9, "acc,none": 0.5, "acc_stderr,none": 0.01}}`` gives "piqa: acc 0.5000 +- 0.0100
    on 9 rows".
    """
    for task, values in figures.items():
        parts = []
        for key, value in values.items():
            name, _, kind = key.partition(",")
            if name.endswith("_stderr") or name == "sample_len" or isinstance(value, str):
                continue
            error = values.get(f"{name}_stderr,{kind}")
            spread = f" +- {error:.4f}" if isinstance(error, float) else ""
            number = "-" if value is None else f"{value:.4f}"
            parts.append(f"{name}{f' ({kind})' if kind not in ('', 'none') else ''} {number}{spread}")
        count = values.get("sample_len")
        rows = f" on {count:,} rows" if isinstance(count, int) else ""
        yield f"{task}: {', '.join(parts) or 'no figures'}{rows}"

"""What evaluations say to people: their figures with the rows that each is of, that the loss rises, why a run ends.

Screen, page, model card and ``ringtune eval`` write a figure by these functions alone, so that it has one meaning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from ringtune.errors import JobError
from ringtune.jobs.job import Job
from ringtune.jobs.parts.keep_best import check_keep_best
from ringtune.schedule.turns.early_stop import Evaluations

FIGURES: Final = (
    *("accuracy", "macro_f1", "entity_f1", "mse", "mae", "pearson", "spearman"),
    *("perplexity", "f1", "exact_match", "loss"),
)
"""Names of the figures that are shown, in this order."""

_OF_QUESTIONS: Final = ("f1", "exact_match")
_OF_COUNTED: Final = (
    *("macro_f1", "macro_precision", "macro_recall", "pearson", "r2", "spearman"),
    *("entity_f1", "entity_precision", "entity_recall"),
)
_COUNTS: Final = ("count", "counted_rows")
_RISES_BY: Final = 1.05
_EVALUATIONS_OF_A_RISE: Final = 2


def figure(value: float | None) -> str:
    """Write a loss or accuracy with four decimals: 0.5 is ``0.5000``; None is ``-``."""
    return "-" if value is None else f"{value:.4f}"


def rows_of(entry: Mapping[str, Any], name: str) -> str:
    """Name the rows that a figure of an evaluation is of.

    Example: ``20 of 29 rows`` of a macro F1, where an owner of 9 rows has sent no counts of classes; the accuracy is
    of ``29 rows``.
    """
    if name in _OF_QUESTIONS and "questions" in entry:
        return f"{entry['questions']} questions"
    count = entry["count"]
    counted = entry.get("counted_rows", count) if name in _OF_COUNTED else count
    return f"{count if counted == count else f'{counted} of {count}'} {_unit(entry)}"


def _unit(entry: Mapping[str, Any]) -> str:
    """What the loss is a mean over: tokens of a language model, words with tags, windows of questions, else rows."""
    if "words" in entry:
        return "words"
    if entry.get("perplexity") is not None:
        return "tokens"
    return "windows" if entry.get("questions") else "rows"


def all_figures(entry: Mapping[str, Any]) -> list[str]:
    """Write each figure of an evaluation on a line, with its rows where they are others than those of the loss.

    A count that is the number of rows once more is left out.
    """
    lines = []
    for name, value in entry.items():
        if isinstance(value, dict) or (name in _COUNTS and value == entry.get("rows")):
            continue
        counted = rows_of(entry, name)
        of = f" (on {counted})" if counted != rows_of(entry, "loss") else ""
        lines.append(f"{name}: {figure(value) if isinstance(value, float) or value is None else value}{of}")
    return lines


def figures_text(entry: Mapping[str, Any]) -> str:
    """Write the figures of an evaluation, and after those of the same rows which rows they are.

    Example: ``accuracy 0.6207, loss 0.6932 on 29 rows; macro f1 0.5200 on 20 of 29 rows``.
    """
    of_all = rows_of(entry, "loss")
    groups: dict[str, list[str]] = {of_all: []}
    for name in FIGURES:
        if entry.get(name) is not None or name == "loss":
            of = rows_of(entry, name)
            groups.setdefault(of, []).append(f"{name.replace('_', ' ')} {figure(entry.get(name))}")
    return "; ".join(f"{', '.join(found)} on {of}{_cut(entry) if of == of_all else ''}" for of, found in groups.items())


def _cut(entry: Mapping[str, Any]) -> str:
    """What no figure counts: words beyond the longest text, tokens beyond the longest row."""
    if entry.get("cut_words"):
        return f" ({entry['cut_words']:,} more are cut, or have no token)"
    is_cut = "words" not in entry and entry.get("perplexity") is not None and entry.get("max_length")
    return f", rows cut at {entry['max_length']}" if is_cut else ""


def rise_text(job: Job, known: Evaluations, loss: float | None, *, is_last: bool) -> str:
    """Say that the evaluation loss rises, and how the best result is kept; empty where it does not.

    It rises if it is 5 % above the best one after two evaluations that were not better, or after one that is the
    last. What ``train.patience_evals`` ends has a sentence of its own.

    Args:
        job: of the run.
        known: of all its evaluations, this one included.
        loss: of this evaluation.
        is_last: whether no evaluation follows.

    Example: ``evaluation loss has risen since step 30 (0.6780 -> 1.826): ...``.
    """
    if known.best is None or loss is None or loss <= known.best * _RISES_BY:
        return ""
    if known.waited < (1 if is_last else _EVALUATIONS_OF_A_RISE) or known.end_a_run(job.train.patience_evals):
        return ""
    rise = f"evaluation loss has risen since step {known.best_step} ({known.best:.4g} -> {loss:.4g})"
    return f"{rise}: {_remedy(job, known.best_step)}"


def _remedy(job: Job, best_step: int) -> str:
    if job.train.keep_best:
        return f"the result of step {best_step} is kept"
    better = f"the result of step {best_step} was better"
    try:
        keeping = dataclasses.replace(job.train, keep_best=True)
        check_keep_best(train=keeping, offload=job.offload, recovery=job.recovery)
    except JobError:  # this job can't keep it
        return f"{better}; train.max_steps = {best_step} ends there"
    return f"{better}; train.keep_best = true keeps it"


def stop_text(step: int, evaluations: Evaluations, *, keeps_best: bool = False) -> str:
    """Say that the run ends, with the best evaluation and how many were not better.

    Example: ``the run ends with step 40: the loss of 2 evaluations was not below 0.5000, that after step 20``.
    """
    where = f"that after step {evaluations.best_step}"
    best = "that of any" if evaluations.best is None else f"{evaluations.best:.4f}, {where}"
    count = "1 evaluation" if evaluations.waited == 1 else f"{evaluations.waited} evaluations"
    of = evaluations.best_step if keeps_best and evaluations.best is not None else step
    return f"the run ends with step {step}: the loss of {count} was not below {best}; the result is that of step {of}"

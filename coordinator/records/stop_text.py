"""Say why a run ends before its last step."""

from __future__ import annotations

from ringtune.schedule.turns.early_stop import Evaluations


def stop_text(step: int, evaluations: Evaluations, *, keeps_best: bool = False) -> str:
    """Say that the run ends, with the best evaluation and how many were not better.

    Example: ``the run ends with step 40: the loss of 2 evaluations was not below 0.5000, that after step 20``.
    """
    where = f"that after step {evaluations.best_step}"
    best = "that of any" if evaluations.best is None else f"{evaluations.best:.4f}, {where}"
    count = "1 evaluation" if evaluations.waited == 1 else f"{evaluations.waited} evaluations"
    of = evaluations.best_step if keeps_best and evaluations.best is not None else step
    return f"the run ends with step {step}: the loss of {count} was not below {best}; the result is that of step {of}"

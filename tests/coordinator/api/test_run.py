"""The picture of a run: what is drawn, and what it is written as."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.api.run import draw_losses, smoothed, unfreezings
from ringtune.errors import UsageError
from ringtune.storage.durable import mark

STEPS = [{"step": number, "loss": 1.0 / number, "depth": 1 + number // 3} for number in range(1, 8)]
EVALUATIONS = [{"step": 7, "loss": 0.2}]


def test_plot_marks_each_step_from_which_more_trains() -> None:
    """The depth of the first step is no change; a step that came late counts once."""
    assert unfreezings(STEPS) == [(3, 2), (6, 3)]
    assert unfreezings([*STEPS, STEPS[0]]) == [(3, 2), (6, 3)]
    assert unfreezings([]) == []


def test_plot_means_are_over_the_last_ten() -> None:
    """At the beginning over as many as there are."""
    assert smoothed([1.0, 3.0]) == [1.0, 2.0]
    assert smoothed([float(value) for value in range(20)])[-1] == sum(range(10, 20)) / 10


def test_plot_has_losses_evaluations_and_depths(tmp_path: Path) -> None:
    """Three lines with data, two that mark depths; the same run gives the same file."""
    plot = draw_losses(STEPS, EVALUATIONS, title="run-1")
    (axes,) = plot.figure.axes
    drawn = [line.get_xydata().tolist() for line in axes.lines]
    assert drawn[0] == [[row["step"], row["loss"]] for row in STEPS]
    assert drawn[2] == [[7.0, 0.2]]
    assert [line[0][0] for line in drawn[3:]] == [3.0, 6.0]
    assert [text.get_text() for text in axes.texts] == ["depth 2", "depth 3"]
    again = draw_losses(STEPS, EVALUATIONS, title="run-1").save(tmp_path / "b.svg")
    assert plot.save(tmp_path / "a.svg").read_bytes() == again.read_bytes()
    assert b"depth 2" in again.read_bytes()
    assert plot._repr_png_().startswith(b"\x89PNG")


def test_plot_reads_as_a_summary_and_has_whole_steps() -> None:
    """Printed it says what is seen: first, last and mean loss, the lowest evaluation, the depths; ticks are steps."""
    plot = draw_losses(STEPS, [{"step": 3, "loss": 0.1}, *EVALUATIONS], title="run-1")
    assert repr(plot).splitlines()[:3] == [
        "run-1: loss 1.0000 at step 1, 0.1429 at step 7, mean of the last 7 steps 0.3704",
        "evaluation: loss 0.2000 at step 7, the lowest 0.1000 at step 3",
        "more blocks train: depth 2 from step 3, depth 3 from step 6",
    ]
    (axes,) = plot.figure.axes
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_plot_refuses_what_it_can_not_draw(tmp_path: Path) -> None:
    """A run without steps, and a picture of another kind."""
    with pytest.raises(UsageError, match="nothing to plot"):
        draw_losses([{**STEPS[0], "loss": None}], [], title="x")
    with pytest.raises(UsageError, match=r"has to end in \.png or \.svg"):
        draw_losses(STEPS, [], title="x").save(tmp_path / "a.pdf")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot_is_saved_over_an_earlier_one_only(ending: str, tmp_path: Path) -> None:
    """Also over one that had other losses, in a run's folder too; a picture of the user's stays as it is."""
    loss, mine = tmp_path / f"loss.{ending}", tmp_path / f"mine.{ending}"
    mark(tmp_path, "run")
    draw_losses(STEPS[:3], [], title="run-1").save(loss)
    before = loss.read_bytes()
    plot = draw_losses(STEPS, EVALUATIONS, title="run-1")
    assert plot.save(loss).read_bytes() != before
    plot.figure.savefig(mine)
    before = mine.read_bytes()
    with pytest.raises(UsageError, match=rf"mine\.{ending} is there already and is no picture drawn by ringtune; give"):
        plot.save(mine)
    assert mine.read_bytes() == before

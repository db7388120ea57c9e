"""The benchmark of operations: its tables, its figures, and when it fails; nothing is measured here."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from ringtune.schedule.placement import Slice
from tests.bench.d2ft import TARGETS, misses, worst_ratios
from tests.bench.d2ft_runs import long_rows, slice_table, spread

SLICES = [Slice(node="a", start=0, stop=2), Slice(node="b", start=2, stop=3), Slice(node="c", start=3, stop=4)]


def test_slice_table_skips_half_of_every_slice() -> None:
    """Neighbours take turns, so that no micro-batch is left out by all."""
    table = slice_table(SLICES, 4, 2)
    assert [entry.rows for entry in table.batches] == [("1131", "3313", "1131", "3313")] * 2
    for block in range(4):
        assert [row[block] for row in table.batches[0].rows].count("3") == 2


def test_spread_is_how_much_less_the_least_busy_board_computes() -> None:
    """Boards that are as busy have none."""
    assert spread({"a": 2.0, "b": 1.5}) == pytest.approx(0.25)
    assert spread({"a": 2.0, "b": 2.0}) == 0.0


def test_misses_are_figures_above_their_target_or_not_measured() -> None:
    """A figure at its target is none."""
    assert misses(TARGETS) == []
    assert misses({**TARGETS, "ring_step_ratio_60": 0.73}) == ["ring_step_ratio_60: 0.73, target at most 0.72"]
    without = {name: most for name, most in TARGETS.items() if name != "workload_variance"}
    assert misses(without) == ["workload_variance: not measured, target at most 1e-09"]
    assert misses({**TARGETS, "hetero_busy_spread": float("nan")}) == [
        "hetero_busy_spread: not measured, target at most 0.1"
    ]


def test_long_rows_join_sentences(tmp_path: Path) -> None:
    """More rows than sentences begin again, with labels of the first one."""
    (tmp_path / "s.csv").write_text("text,label\none,good\ntwo,bad\n")
    with long_rows(tmp_path / "s.csv", tmp_path / "out.csv", 3).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == ["good"] * 3
    assert rows[0]["text"] == " ".join(["one two"] * 6)


def test_worst_ratio_is_that_of_the_model_that_gains_least() -> None:
    """At 1,024 tokens a micro-batch; smaller shapes and the block of Llama are only reported."""
    found = {
        f"{model}_{adapter}_{shape}": {"compute_ratio_60": ratio, "compute_ratio_50": ratio - 0.1}
        for model, ratio in (("minilm", 0.6), ("base", 0.62), ("llama", 0.7))
        for adapter in ("seq_bn", "lora", "full")
        for shape in ("8x128", "2x64")
    }
    ratios = worst_ratios(found | {"base_full_2x64": {"compute_ratio_60": 0.9, "compute_ratio_50": 0.9}}, (8, 128))
    assert ratios["compute_ratio_60_full"] == 0.62
    assert ratios.keys() == {name for name in TARGETS if name.startswith("compute_ratio")}

"""The accuracy bench of operations: which runs there are, how they are told, and when it fails; nothing is trained."""

from __future__ import annotations

from collections import Counter

from ringtune.job.job import Job, Model
from tests.bench.d2ft_accuracy import PAIRS, POLICIES, Run, all_runs, grouped, misses, table_text, wanted
from tests.bench.kept_results import spread_text
from tests.support.cases import cases

RUNS = all_runs([0, 1, 2])


def test_runs_are_every_policy_with_every_adapter_and_every_pair() -> None:
    """Two tasks, three seeds; every name once, so that no result is taken for another's."""
    assert len({run.name for run in RUNS}) == len(RUNS) == 2 * 3 * (3 * len(POLICIES) + len(PAIRS))
    assert Counter(run.task for run in RUNS)["text"] == len(RUNS) // 2


@cases("run", all_runs([0]))
def test_operations_of_a_run_are_taken_by_a_job(run: Run) -> None:
    """At five micro-batches; standard is a run without operations."""
    job = Job(model=Model(path="m")).with_overrides({"train.microbatches": 5, **run.operations})
    assert job.operations.is_chosen == (run.label != "standard")


def test_words_select_runs_that_have_all_of_them() -> None:
    """A task, an adapter, a policy, and either kind."""
    assert {run.name for run in wanted(RUNS, ["text", "lora", "random"])} == {
        f"text-lora-random-{at}" for at in range(3)
    }
    assert len(wanted(RUNS, ["pairs", "images"])) == 3 * len(PAIRS)
    assert wanted(RUNS, ["pairs", "lora"]) == []


def results(**means: float) -> list[dict[str, object]]:
    """Two seeds of each policy with ``full`` on both tasks, two points apart."""
    return [
        {"task": task, "adapter": "full", "label": label.replace("_", "-"), "accuracy": mean + off}
        for task in ("text", "images")
        for label, mean in means.items()
        for off in (-0.01, 0.01)
    ]


GOOD = {"standard": 0.80, "two_stage": 0.785, "random": 0.7, "magnitude": 0.6, "magnitude_gradient": 0.6}


def test_misses_compare_means() -> None:
    """Within two points of standard, and above each of the three."""
    assert misses(grouped(results(**GOOD))) == []
    below = misses(grouped(results(**{**GOOD, "standard": 0.81})))
    assert below[0] == "text: two-stage 78.5%, standard 81.0%, at most 2 points below"
    assert misses(grouped(results(**{**GOOD, "random": 0.79})))[0] == "text: two-stage 78.5% is not above random 79.0%"
    without = {name: mean for name, mean in GOOD.items() if name != "random"}
    assert misses(grouped(results(**without))) == ["text: not measured: random", "images: not measured: random"]


def test_table_has_mean_and_spread() -> None:
    """What was not run is a dash."""
    assert spread_text([0.81, 0.79]) == "80.0 % (79.0 to 81.0, 2 seeds)"
    text = table_text(grouped(results(**GOOD)))
    assert "| policy | full | seq_bn | lora |" in text
    assert "| two-stage | 78.5 % (77.5 to 79.5, 2 seeds) | - | - |" in text

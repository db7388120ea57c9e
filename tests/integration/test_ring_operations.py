"""Real agents whose run chooses its operations: stopped, gone on with, and repeated from its log, to the last bit."""

from __future__ import annotations

import json

from ringtune.job.job import Job
from ringtune.run_control.checkpoint import Resume
from ringtune.schedule.operation_tables import ScheduledTable, tables_to_json
from tests.support.cluster import Cluster, Outcome
from tests.support.results import largest_difference, trained


def chosen(outcome: Outcome) -> list[tuple[int, str]]:
    """(step, digest) of every table that the run chose."""
    return [(line["step"], line["digest"]) for line in outcome.metrics if line.get("kind") == "operations"]


def tables_of(outcome: Outcome) -> list[ScheduledTable]:
    """What the run's ``operations.json`` holds."""
    return [ScheduledTable.from_json(json.loads(text)) for text in outcome.operations]


def run(cluster: Cluster, job: Job, resume: Resume | None = None) -> Outcome:
    """A run that ends well."""
    outcome = cluster.follow(job, resume).wait()
    assert outcome.is_done, outcome.message
    cluster.wait_idle(*cluster.names)
    return outcome


def test_ring_that_chooses_operations_goes_on_and_is_repeated_with_its_tables(cluster: Cluster) -> None:
    """Scores of real gradients: a run from a checkpoint where a table is due ends with the same bits.

    So does a run that is given the tables and scores nothing. Two owners, turns of three steps, tables at 0, 6 and 12.
    """
    settings = {
        "policy": "two-stage",
        "heads": 2,
        "full": 1,
        "forward_only": 0,
        "backward_score": "taylor",
        "refresh_rounds": 1,
    }
    base = cluster.job(train__max_steps=15, train__checkpoint_every=6)
    job = base.with_overrides({f"operations.{name}": value for name, value in settings.items()})
    whole = run(cluster, job)
    assert [step for step, _ in chosen(whole)] == [0, 6, 12]
    assert len({digest for _, digest in chosen(whole)}) > 1, "the scores of the run change nothing"
    middle = next(manifest for manifest in whole.checkpoints if manifest.step == 6)
    assert whole.plan is not None
    rest = run(cluster, job, Resume(plan=whole.plan, manifests=(middle,)))
    assert chosen(rest) == chosen(whole)[1:]
    assert largest_difference(trained(rest), trained(whole)) == 0.0
    table = json.dumps(tables_to_json(tables_of(whole)))
    given = run(cluster, base.with_overrides({"operations.table": table}))
    assert chosen(given) == chosen(whole)
    assert largest_difference(trained(given), trained(whole)) == 0.0

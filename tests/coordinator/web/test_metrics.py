"""Figures for Prometheus: names with units, few labels, values of the run."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from coordinator.web.metrics import MAX_LINKS, MAX_NODES, MetricsCollector
from coordinator.web.streams import MemberStatus, PageData, Streams
from ringtune.v1 import control_pb2
from tests.support.page_runs import RUN_ID, beginning, metrics, step_line, trained

UNITS = ("_bytes", "_seconds", "_ratio")


def samples(page_data: PageData) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels) -> value of what is written."""
    page_data.tick(0.0)
    text = MetricsCollector(Streams(page_data)).text().decode()
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def heard(*events: control_pb2.RunEvent, members: dict[str, MemberStatus] | None = None) -> PageData:
    """A page that has heard events."""
    page_data = PageData(members=lambda: members or {})
    for event in events:
        page_data.hear(event)
    return page_data


def test_figures_of_a_run() -> None:
    """Steps, loss, seconds, traffic and shares as the run told them."""
    found = samples(
        heard(*trained(8), members={"a": MemberStatus("lost", 7, 9, "cpu"), "b": MemberStatus("idle", 8, 9, "cpu")})
    )
    assert found["ringtune_run_info", (("method", "ringada"), ("phase", "done"), ("run_id", RUN_ID))] == 1
    assert found["ringtune_steps_done", ()] == 8
    assert found["ringtune_train_loss", ()] == 1.125
    assert found["ringtune_step_seconds_total", ()] == 4.0
    assert found["ringtune_link_bytes_total", (("source", "a"), ("target", "b"))] == 8000
    assert found["ringtune_node_time_ratio", (("kind", "waiting"), ("node", "a"))] == 0.25
    assert found["ringtune_node_rss_bytes", (("node", "b"),)] == 8
    assert found["ringtune_node_up", (("node", "a"),)] == 0
    assert found["ringtune_nodes", (("state", "lost"),)] == 1


def test_figures_begin_with_the_projects_name_and_end_with_a_unit() -> None:
    """As Prometheus wants it; numbers without a unit are counts, losses and states."""
    names = {name.removesuffix("_total") for name, _ in samples(heard(*trained(8)))}
    assert all(name.startswith("ringtune_") for name in names)
    counts = {name for name in names if not name.endswith(UNITS)}
    assert counts == {
        "ringtune_coordinator_info",
        "ringtune_learning_rate",
        "ringtune_nodes",
        "ringtune_page_browsers",
        "ringtune_page_skipped_frames",
        "ringtune_run_info",
        "ringtune_steps_done",
        "ringtune_steps_planned",
        "ringtune_train_loss",
        "ringtune_trained_blocks",
    }


def test_figures_without_a_run_are_those_of_the_members() -> None:
    """A coordinator that waits is watched, too."""
    found = samples(heard(members={"a": MemberStatus("idle", 7, 9, "cpu")}))
    assert found["ringtune_nodes", (("state", "idle"),)] == 1
    assert ("ringtune_steps_done", ()) not in found


def test_figures_have_a_bounded_number_of_labels() -> None:
    """Links beyond the largest are one figure together; of very many nodes not all are there."""
    links = {f"n{index}>n{index + 1}": 10_000 - index for index in range(3000)}
    members = {f"n{index}": MemberStatus("idle", 1, 1, "cpu") for index in range(3000)}
    found = samples(heard(*beginning(), metrics(step_line(1, bytes=links)), members=members))
    names = [name for name, _ in found]
    assert names.count("ringtune_link_bytes_total") == MAX_LINKS + 1
    assert names.count("ringtune_node_rss_bytes") == MAX_NODES

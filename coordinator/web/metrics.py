"""Metrics for Prometheus: of the newest run, its nodes and links, and of the page.

Names contain units. Labels are bounded: nodes and largest links of one run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.web.streams import Streams
from ringtune import __version__

MAX_NODES: Final = 1000
MAX_LINKS: Final = 500
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_STATES: Final = ("idle", "running", "drained", "draining", "lost")
_SHARES: Final = ("busy", "waiting", "idle")


class MetricsCollector(Collector):
    """Collects the metrics of a page; only for the page's own thread."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self._page_data = streams, streams.page_data
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """Write all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Return no metrics: they are known only when collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its present value."""
        for part in (self._of_run, self._of_members, self._of_nodes, self._of_links, self._of_page):
            yield from part()

    def _of_run(self) -> Iterator[Metric]:
        state, plan = self._page_data.state, self._page_data.state.plan
        run = state.section("run")
        last, evaluation = run.get("last", {}), run.get("evaluation", {})
        yield InfoMetricFamily("ringtune_coordinator", "This process.", value={"version": __version__})
        if not state.run_id:
            return
        labels = {"run_id": state.run_id, "phase": run["phase"], "method": plan.course.method.name if plan else ""}
        yield InfoMetricFamily("ringtune_run", "The newest run.", value=labels)
        if (seconds := state.curves["seconds"].last) is not None:
            text = "Seconds that all steps of the run took together."
            yield CounterMetricFamily("ringtune_step_seconds", text, value=seconds.value)
        figures = {
            "ringtune_steps_done": ("Optimizer steps that are done.", state.steps_done),
            "ringtune_steps_planned": ("Optimizer steps of the run.", plan.course.num_steps if plan else None),
            "ringtune_last_step_seconds": ("Seconds of the newest step.", last.get("seconds")),
            "ringtune_train_loss": ("Loss of the newest step.", last.get("loss")),
            "ringtune_train_accuracy_ratio": ("Accuracy of the newest step.", last.get("accuracy")),
            "ringtune_eval_loss": ("Loss of the newest evaluation.", evaluation.get("loss")),
            "ringtune_eval_accuracy_ratio": ("Accuracy of the newest evaluation.", evaluation.get("accuracy")),
            "ringtune_trained_blocks": ("Blocks that the newest step trained.", last.get("depth")),
            "ringtune_learning_rate": ("Learning rate of the newest step.", last.get("lr")),
        }
        for name, (text, value) in figures.items():
            if isinstance(value, int | float):
                yield GaugeMetricFamily(name, text, value=value)

    def _of_members(self) -> Iterator[Metric]:
        members = self._page_data.members
        counts = GaugeMetricFamily("ringtune_nodes", "Members of the coordinator by state.", labels=["state"])
        for name in _STATES:
            counts.add_metric([name], sum(member.state == name for member in members.values()))
        yield counts
        rss = GaugeMetricFamily("ringtune_node_rss_bytes", "Resident memory of a node.", labels=["node"])
        budget = GaugeMetricFamily("ringtune_node_budget_bytes", "What a node lets a run use.", labels=["node"])
        up = GaugeMetricFamily("ringtune_node_up", "1 = a node is heard of, 0 = it is lost.", labels=["node"])
        for node, member in sorted(members.items())[:MAX_NODES]:
            rss.add_metric([node], member.rss_bytes)
            budget.add_metric([node], member.memory_bytes)
            up.add_metric([node], float(member.state != "lost"))
        yield from (rss, budget, up)

    def _of_nodes(self) -> Iterator[Metric]:
        state = self._page_data.state
        text = "Share of a node's time in the newest turn."
        shares = GaugeMetricFamily("ringtune_node_time_ratio", text, labels=["node", "kind"])
        for node, node_shares in sorted(state.shares.items())[:MAX_NODES]:
            for kind, share in zip(_SHARES, node_shares, strict=True):
                shares.add_metric([node, kind], share)
        yield shares
        needed = GaugeMetricFamily("ringtune_node_planned_bytes", "What the plan needs on a node.", labels=["node"])
        for planned in state.section("plan").get("nodes", ())[:MAX_NODES]:
            needed.add_metric([planned["node"]], planned["needed_bytes"])
        yield needed

    def _of_links(self) -> Iterator[Metric]:
        state = self._page_data.state
        sent = CounterMetricFamily("ringtune_link_bytes", "Payload bytes over a link.", labels=["source", "target"])
        shown = state.links.view(None)
        for source, target, total, _, _ in shown[:MAX_LINKS]:
            sent.add_metric([source, target], total)
        if len(shown) > MAX_LINKS:
            sent.add_metric(["other", "other"], sum(link[2] for link in shown[MAX_LINKS:]))
        yield sent

    def _of_page(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("ringtune_page_browsers", "Open streams of the page.", value=self._streams.open)
        text = "Frames that slow browsers did not get."
        yield CounterMetricFamily("ringtune_page_skipped_frames", text, value=self._streams.skipped)

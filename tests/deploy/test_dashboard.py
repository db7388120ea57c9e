"""The example dashboard asks for figures that there are."""

from __future__ import annotations

import json
import re

from coordinator.web.metrics import MetricsCollector
from coordinator.web.streams import MemberStatus, PageData, Streams
from tests.support.page_runs import metrics, trained
from tests.support.sources import ROOT


def test_dashboard_names_figures_that_a_coordinator_has() -> None:
    """A figure that is renamed would leave an empty panel behind."""
    page_data = PageData(members=lambda: {"a": MemberStatus("idle", 1, 2, "cpu")})
    for event in trained():
        page_data.hear(event)
    page_data.hear(metrics({"kind": "evaluation", "step": 8, "loss": 0.25, "accuracy": 0.75}))
    page_data.tick(0.0)
    there = set(re.findall(r"^(ringtune_\w+)", MetricsCollector(Streams(page_data)).text().decode(), re.MULTILINE))
    dashboard = json.loads((ROOT / "deploy" / "metrics" / "grafana-dashboard.json").read_text(encoding="utf-8"))
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"ringtune_\w+", target["expr"])
    }
    assert len(asked) > 8
    assert asked <= there

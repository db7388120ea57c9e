"""Units and the compose file, as systemd and ``ringtune`` read them; the dashboard asks for figures that there are."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.web.metrics import MetricsCollector
from coordinator.web.streams import MemberStatus, PageData, Streams
from tests.contract.test_hints import parse
from tests.support.cases import cases
from tests.support.page_runs import metrics, trained
from tests.support.sources import ROOT

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
SETTINGS = {"ringtune-coordinator": "coordinator.env", "ringtune-node": "node.env"}
HARDENED = ("NoNewPrivileges", "CapabilityBoundingSet", "ProtectSystem", "PrivateTmp", "RestrictAddressFamilies")
OF_SERVICES = {"image", "build", "command", "restart", "depends_on", "networks", "volumes", "read_only", "cap_drop"}
OF_SERVICES |= {"security_opt", "tmpfs", "stop_grace_period", "profiles"}


def settings(unit: Path) -> dict[str, str]:
    """The variables of a unit's file of settings, and those that systemd sets."""
    lines = (DEPLOY / SETTINGS[unit.stem]).read_text(encoding="utf-8").splitlines()
    found = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {**found, "STATE_DIRECTORY": "/var/lib/ringtune"}


def entries(unit: Path) -> dict[str, str]:
    """The settings of a unit by key."""
    lines = unit.read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


@cases("unit", UNITS)
def test_unit_is_taken_by_systemd(unit: Path, tmp_path: Path) -> None:
    """Nothing of it is unknown or ill-written; the command has to be there, so another stands for it."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here; the Debian package systemd has it")
    text = unit.read_text(encoding="utf-8").replace("/opt/ringtune/bin/ringtune", "/bin/true")
    (tmp_path / unit.name).write_text(text, encoding="utf-8")
    words = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(tmp_path / unit.name)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    assert (done.returncode, done.stderr) == (0, "")


def test_unit_check_sees_a_mistake(tmp_path: Path) -> None:
    """Negative control: a key that systemd does not know."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here; the Debian package systemd has it")
    unit = tmp_path / "wrong.service"
    unit.write_text("[Service]\nExecStart=/bin/true\nProtectSystm=strict\n", encoding="utf-8")
    words = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    assert "ProtectSystm" in done.stderr


@cases("unit", UNITS)
def test_unit_runs_a_command_that_there_is(unit: Path) -> None:
    """With the settings beside it, the line is one that the command line takes; it is locked in."""
    found = entries(unit)
    line = found["ExecStart"]
    for name, value in settings(unit).items():
        line = line.replace(f"${{{name}}}", value).replace(f"${name}", value)
    assert "$" not in line
    parse(line.removeprefix("/opt/ringtune/bin/"))
    assert set(HARDENED) <= found.keys() and found["User"] == "ringtune"
    assert found["RestartPreventExitStatus"] == "2 5"


def services() -> dict[str, dict[str, Any]]:
    """The services of the compose file; no engine is asked, YAML merges are carried out by the reader."""
    value = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    assert set(value) == {"name", "x-node", "services", "networks", "volumes"}
    found: dict[str, dict[str, Any]] = value["services"]
    assert {name for service in found.values() for name in service["networks"]} <= set(value["networks"])
    named = {mount.split(":")[0] for service in found.values() for mount in service["volumes"]}
    assert {mount for mount in named if not mount.startswith((".", "/"))} <= set(value["volumes"])
    return found


@cases("name", ["coordinator", "node-0", "node-1", "node-2", "submit"])
def test_compose_service_runs_a_command_that_there_is(name: str) -> None:
    """Its keys are those of the compose specification that are used here, its words those of the command line."""
    service = services()[name]
    assert set(service) <= OF_SERVICES
    parse(shlex.join(["ringtune", *service["command"]]))
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    arguments = {line.split()[1].split("=")[0] for line in dockerfile() if line.startswith("ARG ")}
    assert set(service["build"]["args"]) <= arguments
    assert set(service.get("depends_on", [])) <= set(services())


def dockerfile() -> list[str]:
    """The lines of the image's file."""
    return (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()


def test_compose_nodes_share_all_rows() -> None:
    """Each takes another part of as many as there are nodes."""
    commands = [service["command"] for name, service in services().items() if name.startswith("node-")]
    shares = [command[command.index("--share") + 1] for command in commands]
    assert shares == [f"{index}/{len(shares)}" for index in range(len(shares))]


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

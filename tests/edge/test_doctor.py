"""The doctor: what it finds, also of certificates, how bad it is, and that every complaint has a remedy."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import typer
from packaging.requirements import Requirement
from typer.testing import CliRunner

from coordinator.server.certificate_authority import Authority
from edge.cli.doctor import doctor as doctor_command
from edge.doctor import (
    Check,
    Level,
    check_coordinator,
    check_disk,
    check_model,
    check_other,
    check_own,
    check_packages,
    check_port,
    check_proxies,
    check_python,
    check_system,
)
from ringtune.errors import UsageError
from ringtune.transport.credentials import Credentials, is_encrypted, use_credentials
from ringtune.transport.endpoints import SERVER_OPTIONS
from ringtune.transport.identity import write_identity
from ringtune.transport.parties import node_party
from ringtune.v1 import control_pb2, control_pb2_grpc
from tests.contract.transport.test_tls import COORDINATOR_ITSELF, serving
from tests.support.trust_parts import AUTHORITY, DAY_S, credentials_of, keep

app = typer.Typer()
app.command()(doctor_command)

REPOSITORY = Path(__file__).parents[2]


def only(checks: list[Check], name: str) -> Check:
    """The check of that name."""
    (found,) = [check for check in checks if check.name == name]
    return found


def test_doctor_compares_versions() -> None:
    """By number and not by text; what was built locally or is a candidate counts as its number."""
    for version, bounds, level in (
        ("2.13.0+cpu", ">=2.13,<2.14", Level.PASS),
        ("2.14.0", ">=2.13,<2.14", Level.FAIL),
        ("2.9.1", ">=2.13,<2.14", Level.FAIL),
        ("1.3.0", "==1.3.*", Level.PASS),
        ("1.30.0", "==1.3.*", Level.FAIL),
        ("4.57.9", "~=4.57.6", Level.PASS),
        ("4.57.5", "~=4.57.6", Level.FAIL),
        ("15", ">=15.0,<16", Level.PASS),
        ("1.86.0rc1", ">=1.85.1,<1.87", Level.PASS),
        ("1.85.1rc1", "<1.85.1", Level.FAIL),
    ):
        (check,) = check_packages([Requirement(f"a{bounds}")], [], find={"a": version}.get)
        assert check.level is level, (version, bounds)


def test_doctor_names_packages_that_are_missing_or_too_new() -> None:
    """What is missing names the versions that do; a wrong version names both numbers; other extras do not count."""
    wanted = [Requirement("a>=1,<2"), Requirement("torch>=2.13,<2.14; extra == 'node'"), Requirement("x; extra == 'y'")]
    checks = check_packages(wanted, ["node"], find={"a": "2.0"}.get)
    assert [(check.name, check.level) for check in checks] == [("a", Level.FAIL), ("torch", Level.FAIL)]
    assert checks[0].found == "2.0, tested is <2,>=1"
    assert checks[1].remedy == "pip install 'torch<2.14,>=2.13'"
    assert [check.name for check in check_packages(wanted, [], find={"a": "1.5"}.get)] == ["a"]


def test_doctor_refuses_32_bit_and_old_python() -> None:
    """There is no torch for 32 bit, and no support of older interpreters."""
    assert check_system(pointer_bytes=4).level is Level.FAIL
    assert "64-bit" in check_system(pointer_bytes=4).remedy
    assert check_python((3, 10, 12)).level is Level.FAIL
    assert check_python((3, 12, 0)).level is Level.PASS


def test_doctor_looks_at_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little room warns, none fails, a folder that is not there fails with what to do."""
    assert check_disk(tmp_path / "none").level is Level.FAIL
    real = shutil.disk_usage(tmp_path)
    for free_bytes, level in ((1 << 40, Level.PASS), (500 << 20, Level.WARN), (1 << 20, Level.FAIL)):
        monkeypatch.setattr("edge.doctor.shutil.disk_usage", lambda _, free=free_bytes: real._replace(free=free))
        assert check_disk(tmp_path).level is level


def test_doctor_sees_a_busy_port() -> None:
    """A port that another server has can't be bound; any free one can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert check_port(address).level is Level.FAIL
    assert check_port("127.0.0.1:0").level is Level.PASS
    assert check_port("203.0.113.9:0").level is Level.FAIL
    with pytest.raises(UsageError, match="HOST:PORT"):
        check_port("7070")


def test_doctor_names_what_is_wrong_with_a_model_folder(model_folder: Path, tmp_path: Path) -> None:
    """Config, weights and tokenizer pass; truncated weights, no tokenizer and no folder are told apart."""
    checks = check_model(model_folder)
    assert [check.level for check in checks] == [Level.PASS] * 3
    assert "bert" in checks[0].found
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    for path in (*folder.glob("*token*"), folder / "vocab.txt"):
        path.unlink()
    checks = check_model(folder)
    assert only(checks, "model weights").level is Level.FAIL
    assert "damaged" in only(checks, "model weights").found
    assert only(checks, "model files").level is Level.WARN
    (missing,) = check_model(tmp_path / "none")
    (tmp_path / "tiny-llama").mkdir()
    (mistyped,) = check_model(tmp_path / "tiny-lama")
    assert f"does not exist (did you mean '{tmp_path / 'tiny-llama'}'?); " in mistyped.found
    assert (missing.name, missing.level) == ("model config", Level.FAIL)


def test_doctor_names_proxies_but_not_their_passwords() -> None:
    """Which variables are set, in whatever case, and that nodes are called directly; an empty one is none."""
    check = check_proxies({"http_proxy": "http://me:secret@proxy:3128", "ALL_PROXY": "x", "https_proxy": ""})
    assert check.found.startswith("ALL_PROXY, http_proxy: ") and "called directly" in check.found
    assert "secret" not in check.found
    assert check_proxies({"no_proxy": "localhost"}).found == "none set"


class OneAnswer(control_pb2_grpc.CoordinatorServicer):
    """A coordinator that only says what it is."""

    def Status(self, request: control_pb2.Empty, context: grpc.ServicerContext) -> control_pb2.StatusReply:
        """Another version, with a clock that stands."""
        return control_pb2.StatusReply(version="99.1.0", now_unix_s=1e9)


@pytest.fixture
def address() -> Iterator[str]:
    """Where the coordinator of another version listens."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        server = grpc.server(pool, options=SERVER_OPTIONS)
        control_pb2_grpc.add_CoordinatorServicer_to_server(OneAnswer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait(30)


def test_doctor_asks_a_coordinator(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers; another version can't be joined; a clock that is years behind is told."""
    monkeypatch.setattr("edge.doctor._CALL_S", 60.0)
    checks = check_coordinator(address)
    assert only(checks, "coordinator").level is Level.PASS
    assert only(checks, "its version").level is Level.FAIL
    assert only(checks, "its clock").level is Level.WARN
    assert "behind" in only(checks, "its clock").found


def test_doctor_exits_with_1_if_anything_fails(tmp_path: Path) -> None:
    """A missing model fails the whole, in words and as JSON; every complaint has a remedy."""
    result = CliRunner().invoke(app, ["--model", str(tmp_path / "none"), "--disk", str(tmp_path), "--json"])
    value = json.loads(result.stdout)
    assert (result.exit_code, value["is_fit"]) == (1, False)
    assert all(bool(check["remedy"]) is (check["level"] != "PASS") for check in value["checks"])
    text = CliRunner().invoke(app, ["--model", str(tmp_path / "none"), "--disk", str(tmp_path)])
    assert text.exit_code == 1
    assert "FAIL  model config" in text.stdout


def test_doctor_of_a_fit_machine_exits_with_0(tmp_path: Path) -> None:
    """Here, with this project's own packages, there is nothing to complain about that fails."""
    result = CliRunner().invoke(app, ["--role", "coordinator", "--bind", "127.0.0.1:0", "--disk", str(tmp_path)])
    assert result.exit_code == 0, result.stdout
    assert "FAIL" not in result.stdout
    assert "torch" not in result.stdout


def test_doctor_loads_nothing_heavy(model_folder: Path, tmp_path: Path) -> None:
    """It tells the versions of torch and its like without importing them."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from edge.doctor import examine\n"
        f"model, disk = Path({str(model_folder)!r}), Path({str(tmp_path)!r})\n"
        "examine('node', model=model, coordinator='', bind='', disk=disk, insecure=False)\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'transformers', 'adapters', 'numpy'}))\n"
    )
    path = os.pathsep.join((str(REPOSITORY / "proto"), str(REPOSITORY)))
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_doctor_refuses_options_that_make_no_sense() -> None:
    """An unknown role, and a coordinator beyond this machine without --insecure."""
    for arguments in (["--role", "boss"], ["--coordinator", "198.51.100.7:7070"]):
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, UsageError)


# ---- certificates ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    yield
    use_credentials(None)


def own(folder: Path | None, *, insecure: bool = False) -> Check:
    """The check of an identity."""
    return check_own("node", folder, insecure=insecure)


def test_doctor_names_whose_certificate_it_is_and_until_when(tmp_path: Path) -> None:
    """From then on it speaks with it; with ``--insecure``, or without one, it is plain text."""
    assert (own(None).level, is_encrypted()) == (Level.PASS, False)
    keep(tmp_path, credentials_of("pi"))
    found = own(tmp_path)
    assert (found.level, is_encrypted()) == (Level.PASS, True)
    assert found.found.startswith("node pi, until 20")
    assert (own(None, insecure=True).level, is_encrypted()) == (Level.PASS, False)


@pytest.mark.parametrize(
    ("later_days", "level", "text"),
    [
        (0, Level.PASS, "until"),
        (-274, Level.PASS, "until"),
        (-276, Level.WARN, "should have been renewed"),
        (-366, Level.FAIL, "has expired"),
        (3, Level.FAIL, "not valid before"),
    ],
)
def test_doctor_judges_the_age_of_a_certificate(tmp_path: Path, later_days: int, level: Level, text: str) -> None:
    """Late is a warning, expired a failure; each says what to do."""
    keep(tmp_path, credentials_of("pi", later_s=later_days * DAY_S))
    found = own(tmp_path)
    assert found.level is level
    assert text in found.found
    assert bool(found.remedy) == (level is not Level.PASS)


OTHERS = {
    "well": (lambda: COORDINATOR_ITSELF, Level.PASS, "of the same authority"),
    "expired": (lambda: credentials_of("coordinator", "coordinator", later_s=-366 * DAY_S), Level.FAIL, "has expired"),
    "a node": (lambda: credentials_of("b"), Level.FAIL, "is of node b, not of a coordinator"),
    "foreign": (
        lambda: credentials_of("coordinator", "coordinator", authority=Authority.make(time.time())),
        Level.FAIL,
        "another authority",
    ),
    "plain": (lambda: None, Level.FAIL, "speaks plain text"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_doctor_checks_the_certificate_of_a_coordinator(tmp_path: Path, case: str) -> None:
    """Chain, dates and name; in plain text there is nothing to check."""
    make, level, text = OTHERS[case]
    server: Credentials | None = make()  # type: ignore[no-untyped-call]
    with serving(server) as (address, _):
        assert check_other(address) == []
        write_identity(tmp_path, AUTHORITY.identity(node_party("pi"), time.time()))
        assert own(tmp_path).level is Level.PASS
        (found,) = check_other(address)
    assert found.level is level
    assert text in found.found


def test_doctor_says_why_a_coordinator_can_not_be_talked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a certificate gRPC knows a closed socket only; the remedy is in the line."""
    monkeypatch.setattr("edge.doctor._CALL_S", 0.05)  # a call that waits for a connection ends then in any case
    monkeypatch.setattr("edge.doctor._WHY_S", 60.0)
    with serving(COORDINATOR_ITSELF) as (address, _):
        (found,) = check_coordinator(address)
    assert found.level is Level.FAIL
    assert "takes certificates only, and this process has none; join with a token" in found.remedy

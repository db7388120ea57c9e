"""A ring of real processes over mutual TLS: the same result, by nodes that joined with tokens, and by no one else."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.server.certificate_authority import Authority, TrustKeeper, make_token
from ringtune import cli
from ringtune.errors import TrustError
from ringtune.job.job import Job
from ringtune.transport.credentials import process_credentials, using_credentials
from ringtune.transport.identity import read_identity
from ringtune.transport.parties import VARIABLE, Party, node_party
from ringtune.v1 import control_pb2
from tests.integration.test_cli_eval import JOB
from tests.support.audit_trails import checked
from tests.support.cluster import RUN_S, Cluster, Outcome
from tests.support.processes import run_ringtune
from tests.support.results import largest_difference, reference_of, trained
from tests.support.tap import Tap
from tests.support.trust_parts import token_option, trusted, write_tokens

pytestmark = pytest.mark.slow

NODES = ("node-0", "node-1", "node-2")
RING = (("node-0", 0, 1), ("node-2", 1, 3), ("node-1", 3, 4))


@contextlib.contextmanager
def encrypted(folder: Path) -> Iterator[tuple[Cluster, TrustKeeper, Tap]]:
    """Three nodes that join with tokens; what goes to the first one passes a tap."""
    keeper = trusted(folder)
    with using_credentials(keeper.credentials):
        tokens = {name: token_option(folder, name) for name in NODES}
        cluster = Cluster(folder, owners=NODES[:2], hosts=NODES[2:], more=tokens, keeper=keeper)
        write_tokens(folder, NODES, ttl_s=RUN_S)
        with contextlib.closing(Tap(cluster.ports["node-0"])) as tap:
            cluster.advertised["node-0"] = tap.port
            with cluster.listening():
                yield cluster, keeper, tap


def ask(cluster: Cluster, trust: Path, *words: str, code: int) -> str:
    """What a command, ``ringtune nodes`` without ``words``, says to a user with the identity of a folder."""
    with using_credentials(process_credentials()):  # the command speaks as the user, in this process
        asked = CliRunner().invoke(
            cli.app, [*(words or ["nodes"]), "--coordinator", cluster.address], env={VARIABLE: str(trust)}
        )
    assert asked.exit_code == code, asked.output
    return asked.output


def assert_trained(cluster: Cluster, job: Job, outcome: Outcome) -> None:
    """Adapters and head are those of one process."""
    assert outcome.is_done, outcome.message
    wanted = reference_of(cluster, job, outcome)
    assert largest_difference(trained(outcome), wanted.adapter() | wanted.head()) < 1e-9


def test_ring_encrypted_gives_the_same_result_and_refuses_a_removed_node(tmp_path: Path) -> None:
    """Nothing readable passes from node to node; who is removed ends with 3, can't come back, and the others train on.

    Of an audited run each node has signed what it did in each turn. The removed node has the reason in its log.
    """
    with encrypted(tmp_path) as (cluster, keeper, tap):
        job = cluster.job(audit__share=0.1, recovery__copies="next")
        outcome = cluster.run(job, plan=cluster.plan_on(job, RING))
        assert_trained(cluster, job, outcome)
        found = checked(outcome, tmp_path / "ledger")
        assert not found.problems and found.figures["signatures"] == found.figures["statements"] > 0
        assert "node-2" in ask(cluster, tmp_path / "trust" / "admin", code=0)
        assert VARIABLE in ask(cluster, tmp_path / "nobody", code=3)
        keeper.remove(node_party("node-2"), "node node-2 was removed: it was stolen")
        assert cluster.wait_exit("node-2") == TrustError.exit_code
        assert "node node-2 was removed: it was stolen" in cluster.log("node-2")
        with pytest.raises(AssertionError, match="was removed: it was stolen"):
            cluster.start("node-2")
        assert cluster.wait_exit("node-2") == TrustError.exit_code
        assert cluster.run(cluster.job(train__max_steps=3)).plan is not None
        for name in NODES:
            assert read_identity(tmp_path / "state" / name / "trust", time.time()).party == node_party(name)
    used = [bytes(flow.sent + flow.received) for flow in tap.flows if flow.received]
    assert used, "other nodes send to node-0 through the tap"
    for word in (b"ringtune.v1", b"node-1", b"node-2"):
        assert not any(word in passed for passed in used)


def test_ring_encrypted_goes_on_while_its_authority_is_rotated(tmp_path: Path) -> None:
    """From the first step on all get certificates of a new one; then the old one is gone, and the adapter is equal.

    The links that were open are ended with it, and opened again; no node is lost, and later runs go on as before.
    """
    admin = tmp_path / "trust" / "admin"
    began, is_over = threading.Event(), threading.Event()

    def hold(event: control_pb2.RunEvent) -> None:
        if event.WhichOneof("event") == "step_json" and not began.is_set():
            began.set()
            is_over.wait(RUN_S)

    with encrypted(tmp_path) as (cluster, keeper, _):
        old, job = keeper.authority_pem, cluster.job()
        plan = cluster.plan_on(job, RING)
        cluster.coordinator.sinks.append(hold)
        follower = cluster.follow(job, plan=plan)
        try:
            assert began.wait(RUN_S)
            first = ask(cluster, admin, "coordinator", "rotate", "--within", "1h", code=0)
            assert "members trust both" in first
            assert "is rotated already" in ask(cluster, admin, "coordinator", "rotate", code=2)
            deadline_s = time.monotonic() + RUN_S
            while json.loads(ask(cluster, admin, "coordinator", "rotate", "--status", "--json", code=0))["phase"]:
                assert time.monotonic() < deadline_s, ask(cluster, admin, "coordinator", "rotate", "--status", code=0)
                time.sleep(0.05)
            while not all("broke and is opened again" in cluster.log(name) for name in NODES):
                assert time.monotonic() < deadline_s, "no link was opened again"
                time.sleep(0.05)
        finally:
            is_over.set()
        outcome = follower.wait()
        assert_trained(cluster, job, outcome)
        assert not outcome.of_kind("recovery")
        assert Authority.read(tmp_path / "trust").certificate_pem == keeper.authority_pem != old
        for name in NODES:
            identity = read_identity(tmp_path / "state" / name / "trust", time.time())
            assert identity.authorities == (keeper.authority_pem,)
        assert cluster.run(cluster.job(train__max_steps=3)).plan is not None


@pytest.mark.thorough
def test_ring_encrypted_goes_on_without_a_host_that_is_killed(tmp_path: Path) -> None:
    """Copies travel under the same certificates."""
    with encrypted(tmp_path) as (cluster, _, _):
        job = cluster.job(train__max_steps=24, train__local_iterations=4, recovery__copies="next")
        follower = cluster.follow(job, plan=cluster.plan_on(job, RING))
        follower.wait_for_steps(5)
        cluster.signal("node-2", signal.SIGKILL)
        outcome = follower.wait()
        cluster.wait_exit("node-2")
        assert_trained(cluster, job, outcome)
        assert [line["lost"] for line in outcome.of_kind("recovery")] == [["node-2"]]


@pytest.mark.thorough
def test_ring_encrypted_is_for_users_with_a_certificate(tmp_path: Path) -> None:
    """One of another machine joins with a token, trains, and evaluates rows of that machine by a guest node."""
    job, mine = tmp_path / "job.toml", tmp_path / "user" / "trust"
    with encrypted(tmp_path) as (cluster, _, _):
        job.write_text(JOB.format(model=cluster.model))
        token = make_token(tmp_path / "trust", Party("submitter", "alice"), time.time() + RUN_S)
        (tmp_path / "alice.token").write_text(str(token))
        there = ("--coordinator", cluster.address)
        joined = run_ringtune("join", *there, "--token-file", tmp_path / "alice.token", "--trust", mine)
        assert (joined.returncode, "submitter alice has a certificate" in joined.stdout) == (0, True), joined.stderr
        as_alice = {VARIABLE: str(mine)}
        trained_there = run_ringtune("train", job, *there, "--out", tmp_path / "run", **as_alice)
        assert trained_there.returncode == 0, trained_there.stderr
        asked = run_ringtune("eval", tmp_path / "run", "--data", cluster.eval, *there, "--json", **as_alice)
        assert asked.returncode == 0, asked.stderr
        assert json.loads(asked.stdout.splitlines()[-1])["count"] == 22
        stranger = run_ringtune("eval", tmp_path / "run", "--data", cluster.eval, *there, **{VARIABLE: ""})
        assert stranger.returncode == TrustError.exit_code
        assert "takes certificates only" in stranger.stderr
    secret = token.secret
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "alice.token":
            assert secret.encode() not in path.read_bytes(), path

"""Evaluation of a finished run's result on a file: in one process, or on the nodes of a coordinator; and its texts.

All start an agent on this machine as the only owner, so the rows stay here. In one process it is also the only host; on
a ring it is one of the hosts. Texts are an evaluation that only writes (``[generation]``): the agent leaves them in its
folder, from which they are read.

Figures by the tasks of lm-eval (``--harness``) are computed in a process with torch and lm-eval
(``edge.runtime.harness``).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from coordinator.api.text_process import LineProcess, command_of
from coordinator.client.follow import Outcome
from coordinator.client.local_nodes import OWN_COORDINATOR, LocalNodes, LocalSetup
from coordinator.client.saved_run import SavedRun, adapter_of, evaluation_job, require_user
from coordinator.client.submit import Client
from coordinator.screen.progress import Progress
from coordinator.server.server import CoordinatorServer
from ringtune.errors import (
    BusyError,
    DataError,
    DeadlineError,
    IntegrityError,
    PeerLostError,
    RingTuneError,
    UsageError,
)
from ringtune.hints import hint_to_install
from ringtune.job.job import Data, Job
from ringtune.job.rows import check_rows
from ringtune.models.family import LANGUAGE_TASKS
from ringtune.storage.arrow_files import is_arrow
from ringtune.storage.durable import write_durably
from ringtune.techniques.generation import TEXTS, GenerationSettings
from ringtune.transport.credentials import is_encrypted, using_credentials

_POLL_S = 0.1
_STOP_S = 8.0


def rows_to_evaluate(given: Path | None, of_job: Data, *, on_ring: bool) -> Path | None:
    """Choose the file of an evaluation: the given one, or that of the run's job.

    Returns:
        None for rows of a ring's nodes, or rows that the job holds out of its training rows.

    Raises:
        DataError: the file does not exist.
        UsageError: none is given, and the job has none.
    """
    if given is None and (on_ring or of_job.held_out):
        return None
    if given is None and not of_job.eval:
        raise UsageError("the run's job has no data.eval; give --data FILE, or nodes with --eval-data")
    rows = given or Path(of_job.eval)
    if not (rows.exists() or is_arrow(rows)):
        raise DataError(f"{rows} is not there; give --data a file with the columns of the run's data.train")
    return rows


def evaluate_alone(run: SavedRun, data: Path | None, *, join_s: float, model: Path | None) -> dict[str, Any]:
    """Evaluate in one process on this machine; all files of the evaluation are temporary.

    ``data`` = None: rows that the job holds out of its training rows. ``model`` replaces the job's; the process has
    ``join_s`` seconds to start.

    Returns:
        ``count``, ``loss``, ``accuracy`` and further figures of the task.

    Raises:
        RingTuneError: the error of the evaluation.
    """
    job = evaluation_job(run, data, model=model)
    check_rows(job.model.task, job.data)
    with using_credentials(None), CoordinatorServer("127.0.0.1:0", lease_s=job.runtime.lease_s) as server:
        try:
            with _evaluated(run, job, server.address, join_s=join_s, options=[OWN_COORDINATOR]) as (outcome, _):
                return _figures(outcome)
        finally:
            server.coordinator.stop("the evaluation is over", _STOP_S)


def evaluate_on_ring(
    run: SavedRun, data: Path | None, address: str, *, join_s: float, model: Path | None, insecure: bool
) -> dict[str, Any]:
    """As ``evaluate_alone``, on the nodes of a running coordinator and one more here that owns the rows.

    ``data`` stays on this machine; None = the evaluation rows of the nodes. ``model`` replaces the job's, on this
    machine only; the node here has ``join_s`` seconds to join.
    """
    job = evaluation_job(run, data)
    if data is None:
        with _free_coordinator(address, insecure=insecure) as client:
            outcome = client.evaluate(job, owner="", saved=run.saved, progress=Progress())
        return _figures(outcome)
    check_rows(job.model.task, job.data)
    options = _guest_options(model, insecure=insecure)
    with _evaluated(run, job, address, join_s=join_s, insecure=insecure, options=options) as (outcome, _):
        return _figures(outcome)


def _guest_options(model: Path | None, *, insecure: bool) -> list[str]:
    """Return the options of a node that joins for its own rows only, which are never used for training."""
    place = ["--model", str(model.resolve())] if model is not None else []
    return ["--guest", *(["--insecure"] if insecure else []), *place]


def texts_on_ring(
    run: SavedRun,
    data: Path,
    settings: GenerationSettings,
    address: str,
    *,
    join_s: float,
    model: Path | None,
    insecure: bool,
) -> Iterator[dict[str, Any]]:
    """Continue the rows of a file with a run's language model on the nodes of a running coordinator.

    Arguments as ``evaluate_on_ring``; the texts come to this machine only.

    Yields:
        For each row of the file ``row``, ``predicted`` (with ``predicted`` and ``tokens``), and whether it ``is_cut``.

    Raises:
        RingTuneError: the error of the run.
    """
    options = _guest_options(model, insecure=insecure)
    job = dataclasses.replace(evaluation_job(run, data), generation=dataclasses.replace(settings, loss=False))
    job = job.with_overrides(dict.fromkeys(("train.batch_size", "train.microbatches"), settings.at_once))  # as planned
    try:
        with _evaluated(run, job, address, join_s=join_s, insecure=insecure, options=options) as (_, states):
            files = list(states.glob(f"*/*/{TEXTS}"))
            if len(files) != 1:
                raise IntegrityError("the coordinator ended the run without a text; use one version on all machines")
            texts = files[0].open("rb")  # outlives its folder
    except PeerLostError as error:
        again = "texts that were begun are kept nowhere: type the command again, it takes the nodes that are there"
        raise type(error)(f"{error}; {again}") from error
    yield from in_order(texts)


def in_order(texts: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield texts by the numbers of their rows, one in memory at a time.

    One that a lost host made its owner write again stands in the file twice; the later one counts.
    """
    places, place = dict[int, int](), 0
    with texts:
        for line in texts:
            places[json.loads(line)["number"]] = place
            place += len(line)
        for number in sorted(places):
            texts.seek(places[number])
            yield json.loads(texts.readline())


def _figures(outcome: Outcome) -> dict[str, Any]:
    evaluation = outcome.report.get("eval")
    if not isinstance(evaluation, dict) or "count" not in evaluation:
        raise IntegrityError("the coordinator sent no evaluation; use one version on all machines")
    return evaluation


@contextmanager
def _evaluated(
    run: SavedRun, job: Job, address: str, *, join_s: float, insecure: bool | None = None, options: list[str]
) -> Iterator[tuple[Outcome, Path]]:
    """Evaluate with an agent of this machine as the owner; yield the outcome and the parent of the agent's folder."""
    owner = f"eval-{secrets.token_hex(4)}"
    ended: list[RingTuneError] = []
    with (
        _free_coordinator(address, insecure=insecure) as client,
        tempfile.TemporaryDirectory(prefix="ringtune-") as name,
        LocalNodes(
            LocalSetup.of(job, 1),
            job,
            address,
            logs=Path(name),
            on_exit=lambda _, error: ended.append(error),
            names=[owner],
            options=[*options, *_invitation(client, owner, Path(name) / "token")],
            states=Path(name) / "states",
        ),
    ):
        _await_member(client, owner, ended, join_s)
        try:
            outcome = client.evaluate(job, owner=owner, saved=run.saved, progress=Progress())
        except RingTuneError as error:
            raise (ended or [error])[0] from error
        yield outcome, Path(name) / "states"


def _invitation(client: Client, node: str, file: Path) -> list[str]:
    """Get a token for the node of this machine if the coordinator is encrypted; return the node's options."""
    if not is_encrypted():
        return []
    write_durably(file, client.invite(node).encode(), mode=0o600)
    return ["--token-file", str(file)]


def _free_coordinator(address: str, *, insecure: bool | None) -> Client:
    """Connect to an idle coordinator; refuse a busy one before an agent is started, which takes seconds."""
    client = Client(address, insecure=insecure)
    try:
        status = client.status()
        if status.HasField("run") and not status.run.is_over:
            raise BusyError(
                f"coordinator {address} drives run {status.run.run_id} ({status.run.phase}); wait for its end"
            )
    except BaseException:
        client.close()
        raise
    return client


def _await_member(client: Client, name: str, ended: list[RingTuneError], join_s: float) -> None:
    """Wait until the agent ``name`` has joined; raise its error if it ends before."""
    deadline_s = time.monotonic() + join_s
    while name not in {entry.joined.node for entry in client.nodes()}:
        if ended:
            raise ended[0]
        if time.monotonic() >= deadline_s:
            raise DeadlineError(f"waited {join_s:g} s for node {name} of this machine to join; raise --join-s")
        time.sleep(_POLL_S)


Figures = Mapping[str, Mapping[str, Any]]
SILENCE_S: Final = 3600.0
"""Longest time between two requests; data sets may be fetched before the first one."""


def harness(
    run: SavedRun,
    tasks: Sequence[str],
    *,
    data: Path | None = None,
    model: Path | None = None,
    user: str = "",
    apply_chat_template: bool = False,
    tell: Callable[[str], object] = str,
) -> Figures:
    """Return the figures of a run by the names of lm-eval's tasks.

    ``data`` is a folder with tasks of one's own, and with the files that they name; ``model`` replaces the run's folder
    of the model; with ``apply_chat_template`` contexts are conversations in the run's template; ``tell`` gets a line
    after the 1st, 10th, 100th, ... request.

    Raises:
        UsageError: lm-eval is not installed, the run's model writes no text, or an argument is wrong.
        RingTuneError: the error of the process.
    """
    if run.job.model.task not in LANGUAGE_TASKS:
        raise UsageError(f"--harness is for language models, {run.folder} learned {run.job.model.task}; leave it out")
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(f"--harness needs lm-eval, not installed here; {hint_to_install('harness')}")
    if not tasks or not all(name and name.isprintable() and "," not in name for name in tasks):
        raise UsageError("--harness has no tasks; name some of lm-eval's, with a comma between them")
    if data is not None and not data.is_dir():
        raise UsageError(f"--harness-data {data} is no folder; give one with tasks of lm-eval")
    require_user(run, user)
    with tempfile.TemporaryDirectory(prefix="ringtune-") as name, adapter_of(run, user) as chosen:
        words = [",".join(tasks), *([str(data.resolve())] if data else [])]
        words += ["--apply-chat-template"] if apply_chat_template else []
        job = evaluation_job(chosen, None, model=model)
        command = command_of("harness", chosen, job, Path(name), *words)
        late = f"no request of lm-eval was done within {SILENCE_S:g} s; take a smaller task, or a faster machine"
        figures: Figures = {}
        with LineProcess("the evaluation", command, Path(name) / "log") as process:
            for line in process.lines(SILENCE_S, late):
                figures = line.get("tasks", figures)
                if "done" in line and str(line["done"]).strip("0") == "1":
                    tell(f"lm-eval: {line['done']:,} requests")
        if not figures:
            raise IntegrityError("lm-eval ended without figures; look whether code of a task ends the process")
        return figures


def lines_of(figures: Figures) -> Iterator[str]:
    """Write the figures, those of a task in one line; an error beside its figure, and the number of rows at the end.

    A figure that is no finite number is a dash.

    Example: ``{"piqa": {"sample_len": 9, "acc,none": 0.5, "acc_stderr,none": 0.01}}`` gives "piqa: acc 0.5000 +- 0.0100
    on 9 rows".
    """
    for task, values in figures.items():
        parts = []
        for key, value in values.items():
            name, _, kind = key.partition(",")
            if name.endswith("_stderr") or name == "sample_len" or isinstance(value, str):
                continue
            error = values.get(f"{name}_stderr,{kind}")
            spread = f" +- {error:.4f}" if isinstance(error, float) else ""
            number = "-" if value is None else f"{value:.4f}"
            parts.append(f"{name}{f' ({kind})' if kind not in ('', 'none') else ''} {number}{spread}")
        count = values.get("sample_len")
        rows = f" on {count:,} rows" if isinstance(count, int) else ""
        yield f"{task}: {', '.join(parts) or 'no figures'}{rows}"

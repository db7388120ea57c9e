"""What a failed call to a node means, and that a lost one is made again and carried out once."""

from __future__ import annotations

import queue
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from coordinator.run import node_client as file_calls
from coordinator.run.node_client import AgentCalls, AgreedModel, node_error
from ringtune.errors import (
    DataError,
    DeadlineError,
    FrameError,
    IntegrityError,
    ModelError,
    PeerLostError,
    RingTuneError,
)
from ringtune.models.weights_by_digest import ModelManifest, ModelSource, Offers
from ringtune.schedule.turns import turn_sequence
from ringtune.storage.chunks import CHUNK_BYTES, cut_pieces
from ringtune.storage.pieces import Pieces
from ringtune.transport.channels import Server
from ringtune.transport.status import abort, status_of_error
from ringtune.transport.weights_servicer import WeightsServicer
from ringtune.v1 import control_pb2, control_pb2_grpc, weights_pb2, weights_pb2_grpc
from tests.support import failpoints
from tests.support.failpoints import DONE_SUFFIX
from tests.support.plans import make_plan
from tests.support.weights_parts import poisoned, write_bert

WAIT_S = 30.0
TURNS = tuple(turn_sequence(make_plan([("a", 0, 4)], ["a"]).course))


class Node(control_pb2_grpc.AgentServicer):
    """Answers each grant as it is told; ``None`` = well."""

    def __init__(self, answers: Sequence[grpc.StatusCode | RingTuneError | None]) -> None:
        self._answers = iter(answers)
        self.loaded = 0
        self.released: list[str] = []
        self.grants: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        self.moves: queue.SimpleQueue[int] = queue.SimpleQueue()

    def Grant(self, request: control_pb2.GrantRequest, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Answer, and remember which turns came."""
        self.grants.put([turn.index for turn in request.turns])
        answer = next(self._answers, grpc.StatusCode.UNAVAILABLE)
        if isinstance(answer, grpc.StatusCode):
            context.abort(answer, "the network is away")
        if isinstance(answer, RingTuneError):
            abort(context, answer)
        return control_pb2.Empty()

    def Alive(self, request: control_pb2.Empty, context: grpc.ServicerContext) -> control_pb2.Empty:
        """It is."""
        return control_pb2.Empty()

    def Move(self, request: control_pb2.MoveRequest, context: grpc.ServicerContext) -> control_pb2.MoveReply:
        """Remember where to; a move to placement 1 waits until the test ends or it is called off."""
        self.moves.put(request.prepare.placement_number)
        if request.prepare.placement_number == 1:
            called_off = threading.Event()
            context.add_callback(called_off.set)
            called_off.wait(WAIT_S)
        return control_pb2.MoveReply()

    def FetchAhead(
        self, request: control_pb2.PrepareRequest, context: grpc.ServicerContext
    ) -> control_pb2.FetchAheadReply:
        """Fetch 9 bytes for placement 2, nothing for placement 3, and for placement 1 until it is called off."""
        if request.placement_number == 1:
            called_off = threading.Event()
            context.add_callback(called_off.set)
            self.moves.put(0)
            called_off.wait(WAIT_S)
            self.moves.put(1)
        if request.placement_number == 3:
            abort(context, DataError("no room on its disk"))
        return control_pb2.FetchAheadReply(fetched_bytes=9)

    def Collect(
        self, request: control_pb2.CollectRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.FileChunk]:
        """Send a file of three messages, if it may take as long as it does."""
        left_s = context.time_remaining()
        name = "totals.json" if left_s is None or left_s > 1e6 else "too_late"
        yield from cut_pieces(name, [bytes(3 * CHUNK_BYTES)])

    def Load(
        self, request_iterator: Iterator[control_pb2.LoadChunk], context: grpc.ServicerContext
    ) -> control_pb2.Empty:
        """Take all messages, if that may take as long as it does."""
        left_s = context.time_remaining()
        self.loaded = sum(len(message.file.chunk) for message in request_iterator)
        if left_s is not None and left_s < 1e6:
            abort(context, DeadlineError("it has a deadline"))
        return control_pb2.Empty()

    def Prepare(self, request: control_pb2.PrepareRequest, context: grpc.ServicerContext) -> control_pb2.PrepareReply:
        """Host nothing."""
        return control_pb2.PrepareReply(hosted_bytes=7)

    def Rest(self, request: control_pb2.RestRequest, context: grpc.ServicerContext) -> control_pb2.RestReply:
        """Keep nothing."""
        return control_pb2.RestReply()

    def Release(self, request: control_pb2.ReleaseRequest, context: grpc.ServicerContext) -> control_pb2.Empty:
        """Remember why."""
        self.released.append(request.reason)
        return control_pb2.Empty()


def wait_for(event: threading.Event) -> None:
    """Wait until somebody sets the event."""
    event.wait(WAIT_S)


@contextmanager
def calls_to(
    node: control_pb2_grpc.AgentServicer, *, lease_s: float = 60.0, wait_s: float = WAIT_S
) -> Iterator[tuple[AgentCalls, queue.SimpleQueue[RingTuneError]]]:
    """Calls to a node, and their failures."""
    failures: queue.SimpleQueue[RingTuneError] = queue.SimpleQueue()
    server = Server("127.0.0.1:0", lambda made: control_pb2_grpc.add_AgentServicer_to_server(node, made))
    calls = AgentCalls(
        "pi", server.address, "r", lease_s=lease_s, wait_s=wait_s, on_failure=lambda _, error: failures.put(error)
    )
    try:
        yield calls, failures
    finally:
        calls.close()
        server.stop(0.0)


def test_node_that_answers_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked beside the call under way; without a process there is no answer."""
    monkeypatch.setattr(file_calls, "ALIVE_S", WAIT_S)
    heard: queue.SimpleQueue[bool] = queue.SimpleQueue()
    with calls_to(Node([])) as (calls, _):
        calls.ask_alive(heard.put)
        assert heard.get(timeout=WAIT_S)
        gone = AgentCalls("pi", "127.0.0.1:1", "r", lease_s=60.0, wait_s=WAIT_S, on_failure=lambda *_: None)
        gone.ask_alive(heard.put)
        assert not heard.get(timeout=WAIT_S)
        gone.close()


def test_node_is_released_also_at_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a run may release nodes when the main thread has ended, and Python's executors take nothing."""
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    with calls_to(node := Node([])) as (calls, _):
        calls.release("the coordinator ends").result(WAIT_S)
        assert node.released == ["the coordinator ends"]


def test_result_may_take_as_long_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call has no deadline of its own: whoever waits hears of each message, and gives up when none comes."""
    monkeypatch.setattr(file_calls, "_PROGRESS_S", 0.0)
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    with calls_to(Node([])) as (calls, _):
        calls.collect(
            control_pb2.CollectRequest(),
            tmp_path,
            max_bytes=4 * CHUNK_BYTES,
            on_result=lambda files: heard.put(f"{files['totals.json'].size_bytes}"),
            on_progress=lambda: heard.put("progress"),
        )
        found = [heard.get(timeout=WAIT_S) for _ in range(4)]
    assert found == ["progress"] * 3 + [f"{3 * CHUNK_BYTES}"]


class Dripping(Node):
    """Sends a result that never ends, without a byte in any message."""

    def __init__(self) -> None:
        super().__init__([])
        self.has_ended = threading.Event()

    def Collect(
        self, request: control_pb2.CollectRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.FileChunk]:
        """Send empty messages until the caller has had enough."""
        context.add_callback(self.has_ended.set)
        while context.is_active():
            yield control_pb2.FileChunk(path="totals.json")


def test_result_that_never_ends_is_the_failure_of_its_node(tmp_path: Path) -> None:
    """Empty messages are no progress: they end after ``wait_s``, and the node is named; it is made to stop."""
    node = Dripping()
    with calls_to(node, wait_s=0.05) as (calls, failures):
        calls.collect(control_pb2.CollectRequest(), tmp_path, max_bytes=CHUNK_BYTES, on_result=lambda files: None)
        error = failures.get(timeout=WAIT_S)
        assert node.has_ended.wait(WAIT_S)
    assert type(error) is IntegrityError
    assert re.match(
        r"node pi has sent 0 bytes in \d+ s, less than 8,192 a second after the first 0\.05 s; ", str(error)
    )


def test_saved_result_may_take_as_long_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, on the way to a node."""
    monkeypatch.setattr(file_calls, "_PROGRESS_S", 0.0)
    node, heard = Node([]), queue.SimpleQueue[str]()
    with calls_to(node) as (calls, _):
        calls.prepare(
            control_pb2.PrepareRequest(),
            saved={"adapter.safetensors": Pieces.of(bytes(3 * CHUNK_BYTES))},
            on_result=lambda hosted_bytes: heard.put(f"{hosted_bytes}"),
            on_progress=lambda: heard.put("progress"),
        )
        found = [heard.get(timeout=WAIT_S) for _ in range(4)]
    assert found == ["progress"] * 3 + ["7"]
    assert node.loaded == 3 * CHUNK_BYTES


def test_node_fetches_ahead_beside_all_other_calls() -> None:
    """Grants do not wait for it, and whoever asks for something else, or closes, calls it off."""
    node, heard = Node([None]), queue.SimpleQueue[int | str]()

    def ask(placement_number: int) -> None:
        request = control_pb2.PrepareRequest(placement_number=placement_number)
        calls.fetch_ahead(request, on_result=heard.put, on_failed=lambda error: heard.put(str(error)))

    with calls_to(node) as (calls, _):
        ask(1)
        assert node.moves.get(timeout=WAIT_S) == 0
        calls.grant(TURNS[:1])
        assert node.grants.get(timeout=WAIT_S) == [0]
        ask(2)
        assert (node.moves.get(timeout=WAIT_S), heard.get(timeout=WAIT_S)) == (1, 9)
        ask(3)
        assert heard.get(timeout=WAIT_S) == "node pi: no room on its disk"
        ask(1)
    assert heard.empty()  # who closes does not want to hear of it


@pytest.mark.parametrize("has_begun", [False, True])
def test_node_moves_elsewhere_instead_at_once(*, has_begun: bool) -> None:
    """A move that the node has not heard of yet is never asked for, and one that it works on is called off."""
    node, heard, free = Node([]), queue.SimpleQueue[int](), threading.Event()
    with calls_to(node) as (calls, _):

        def move(placement_number: int) -> None:
            request = control_pb2.MoveRequest(prepare=control_pb2.PrepareRequest(placement_number=placement_number))
            calls.move(
                request,
                on_result=lambda _: heard.put(placement_number),
                on_failed=lambda error: heard.put(-1),
            )

        # another call of this node, which a move doesn't call off, is under way, so that moves wait for their turn
        calls.rest(0, on_result=lambda _: wait_for(free), on_failed=lambda error: heard.put(-2))
        if has_begun:
            free.set()
        move(1)
        began = [node.moves.get(timeout=WAIT_S)] if has_begun else []
        move(0)
        free.set()
        assert heard.get(timeout=WAIT_S) == 0
        assert [*began, node.moves.get(timeout=WAIT_S)] == ([1, 0] if has_begun else [0])


def test_grant_is_given_again_while_a_node_is_silent_and_stays_in_order() -> None:
    """A network that was away for two calls costs no run; the next grant comes after the one that was repeated."""
    away = grpc.StatusCode.UNAVAILABLE
    node = Node([away, grpc.StatusCode.DEADLINE_EXCEEDED, None, None])
    with calls_to(node) as (calls, _):
        calls.grant(TURNS[:2])
        calls.grant(TURNS[2:3])
        assert [node.grants.get(timeout=WAIT_S) for _ in range(4)] == [[0, 1], [0, 1], [0, 1], [2]]


@pytest.mark.promise("6 every wait ends")
def test_grant_to_a_node_that_stays_silent_fails_after_the_lease() -> None:
    """The node is named; how often it is asked until then is the rule of any call (``RetryState``)."""
    with calls_to(Node([]), lease_s=0.1) as (calls, failures):
        calls.grant(TURNS)
        assert type(error := failures.get(timeout=WAIT_S)) is PeerLostError
        assert re.match(r"node pi at 127\.0\.0\.1:\d+ does not answer", str(error))


def test_grant_that_the_node_refuses_is_not_repeated() -> None:
    """What the node itself says is its answer."""
    node = Node([DataError("train.csv has no rows")])
    with calls_to(node) as (calls, failures):
        calls.grant(TURNS)
        assert type(failures.get(timeout=WAIT_S)) is DataError
    assert node.grants.qsize() == 1


def test_node_error_keeps_what_the_node_said() -> None:
    """The node's own error keeps its class, and its name is added if it is missing."""
    said = status_of_error(DataError("train.csv has no rows"))
    error = node_error(said.name, said.details, node="pi", address="x:1")
    assert type(error) is DataError
    assert str(error) == "node pi: train.csv has no rows"
    refused = FrameError("node pi can't send to node b")
    refused.peer = "b"
    said = status_of_error(refused)
    assert node_error(said.name, said.details, node="pi", address="x:1").peer == "b"
    waited = status_of_error(DeadlineError("node pi waited for b"))
    assert type(node_error(waited.name, waited.details, node="pi", address="x:1")) is DeadlineError
    # A path that contains the node's name does not say which node it is
    said = status_of_error(DataError("/data/pi/train.csv has no rows"))
    assert str(node_error(said.name, said.details, node="pi", address="x:1")).startswith("node pi: ")


FILE = Pieces.of(bytes(3 * CHUNK_BYTES))
_SAYS = Callable[[object], None]


class Counting(control_pb2_grpc.AgentServicer):
    """Does at once what it is told, and counts what it has done."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        """Count the calls that have an answer of one message."""
        replies: dict[str, Any] = {
            "Inspect": control_pb2.InspectReply(facts_json="facts"),
            "MeasureLink": control_pb2.MeasureLinkReply(samples=3),
            "Repeat": control_pb2.RepeatReply(results_json="{}"),
            "Prepare": control_pb2.PrepareReply(hosted_bytes=7),
            "FetchAhead": control_pb2.FetchAheadReply(fetched_bytes=9),
            "Rest": control_pb2.RestReply(totals_json="{}"),
            "Move": control_pb2.MoveReply(fetched_bytes=8),
            "Grant": control_pb2.Empty(),
            "Release": control_pb2.Empty(),
        }
        if name not in replies:
            return super().__getattribute__(name)

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            self.done[name] += 1
            return replies[name]

        return answer

    def Load(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> control_pb2.Empty:
        """Take a file."""
        sizes = [len(message.file.chunk) for message in request_iterator]
        self.done["Load"] += sum(sizes) == FILE.size_bytes
        return control_pb2.Empty()

    def Collect(self, request: Any, context: grpc.ServicerContext) -> Iterator[control_pb2.FileChunk]:
        """Send a file of several messages."""
        self.done["Collect"] += 1
        yield from cut_pieces("totals.json", [bytes(3 * CHUNK_BYTES)])


def _grant(calls: AgentCalls, say: _SAYS, _: Path) -> None:
    calls.grant(TURNS[:1])
    calls.halt(on_result=lambda _: say("after it"), on_failed=say)


def _collect(calls: AgentCalls, say: _SAYS, folder: Path) -> None:
    def read(files: Mapping[str, Pieces]) -> None:
        say(bytes(files["totals.json"]) == bytes(3 * CHUNK_BYTES))

    calls.collect(control_pb2.CollectRequest(), folder, max_bytes=4 * CHUNK_BYTES, on_result=read)


PREPARE = control_pb2.PrepareRequest()
MOVE = control_pb2.MoveRequest(prepare=PREPARE)
CASES: Final[dict[str, tuple[str, Callable[[AgentCalls, _SAYS, Path], object], object]]] = {
    "inspect": (
        "Inspect",
        lambda calls, say, _: calls.inspect(control_pb2.InspectRequest(), lambda reply: say(reply.facts_json)),
        "facts",
    ),
    "measure_link": (
        "MeasureLink",
        lambda calls, say, _: calls.measure_link(control_pb2.MeasureLinkRequest(), lambda reply: say(reply.samples)),
        3,
    ),
    "prepare": ("Prepare", lambda calls, say, _: calls.prepare(PREPARE, on_result=say), 7),
    "load": (
        "Load",
        lambda calls, say, _: calls.prepare(PREPARE, on_result=say, saved={"adapter.safetensors": FILE}),
        7,
    ),
    "fetch_ahead": ("FetchAhead", lambda calls, say, _: calls.fetch_ahead(PREPARE, on_result=say, on_failed=say), 9),
    "rest": (
        "Rest",
        lambda calls, say, _: calls.rest(0, on_result=lambda reply: say(reply.totals_json), on_failed=say),
        "{}",
    ),
    "halt": ("Rest", lambda calls, say, _: calls.halt(on_result=lambda _: say("halted"), on_failed=say), "halted"),
    "move": (
        "Move",
        lambda calls, say, _: calls.move(MOVE, on_result=lambda reply: say(reply.fetched_bytes), on_failed=say),
        8,
    ),
    "repeat": (
        "Repeat",
        lambda calls, say, _: calls.repeat(
            control_pb2.RepeatRequest(node="b"), on_result=lambda reply: say(reply.results_json), on_failed=say
        ),
        "{}",
    ),
    "grant": ("Grant", _grant, "after it"),
    "collect": ("Collect", _collect, True),
    "release": (
        "Release",
        lambda calls, say, _: calls.release("over").add_done_callback(lambda done: say(done.exception())),
        None,
    ),
}
MAY_COME_TWICE: Final = ("Load", "Grant", "Collect", "Release")
"""What a node may do twice: it says which turns, files or run it is about, and changes nothing the second time."""


@pytest.fixture
def orders(tmp_path: Path) -> Iterator[Path]:
    """The folder of this process's failpoints."""
    folder = tmp_path / "orders"
    folder.mkdir()
    failpoints.arm("coordinator", folder)
    yield folder
    failpoints.disarm()


def test_every_call_is_tried() -> None:
    """A new call of the service is lost in a test, too; whether a node lives is asked once."""
    assert {"Alive", *(method for method, _, _ in CASES.values())} == {
        method.name for method in control_pb2.DESCRIPTOR.services_by_name["Agent"].methods
    }


@pytest.mark.parametrize("failure", ["drop-request", "drop-reply"])
@pytest.mark.parametrize("name", list(CASES))
def test_lost_call_is_made_again(
    orders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, failure: str
) -> None:
    """The caller gets the answer, and a node does nothing twice that it may not."""
    monkeypatch.setattr(file_calls, "_RELEASE_S", 2 * WAIT_S)
    method, ask, wanted = CASES[name]
    node, heard = Counting(), queue.SimpleQueue[object]()
    (orders / "coordinator").write_text(f"call {method} 1 {failure}")
    folder = tmp_path / "came"
    folder.mkdir()
    with calls_to(node) as (calls, failures):
        ask(calls, heard.put, folder)
        assert heard.get(timeout=WAIT_S) == wanted
    assert failures.empty()
    assert (orders / f"coordinator{DONE_SUFFIX}").exists(), "nothing was lost"
    lost_later = failure == "drop-reply" and method in MAY_COME_TWICE
    assert node.done[method] == 1 + lost_later


def test_halt_calls_off_a_call_that_is_being_repeated(orders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A move that is lost is not made again after the node was told to stop."""
    monkeypatch.setattr("ringtune.transport.retry.RETRY_S", WAIT_S / 2)  # so it is told before, however late
    node, heard = Counting(), queue.SimpleQueue[object]()
    lost, reached = threading.Event(), failpoints.reached

    def tells(place: str) -> failpoints.Order | None:
        if (order := reached(place)) is not None:
            lost.set()
        return order

    monkeypatch.setattr(failpoints, "reached", tells)
    (orders / "coordinator").write_text("call Move 1 drop-request")
    with calls_to(node) as (calls, _):
        CASES["move"][1](calls, heard.put, orders)
        assert lost.wait(WAIT_S)
        CASES["halt"][1](calls, heard.put, orders)
        assert heard.get(timeout=WAIT_S) == "halted"
    assert node.done == {"Rest": 1}


class Inspected(control_pb2_grpc.AgentServicer):
    """A node that has a model, or lacks it until it is told which one to fetch."""

    def __init__(self, folder: Path | None) -> None:
        self.offers, self.told = Offers(), list[str]()
        self.offers.put("r", folder)
        self._has_model = folder is not None

    def Inspect(self, request: control_pb2.InspectRequest, context: grpc.ServicerContext) -> control_pb2.InspectReply:
        """Say whether it has the model."""
        self.told.append(request.model_sha256)
        return control_pb2.InspectReply(facts_json="{}", lacks_model=not self._has_model and not request.model_sha256)

    def add_to(self, server: grpc.Server) -> None:
        """Serve both services of a node that the coordinator asks."""
        control_pb2_grpc.add_AgentServicer_to_server(self, server)
        weights_pb2_grpc.add_WeightsServicer_to_server(WeightsServicer(self.offers), server)


def inspect_all(
    nodes: dict[str, Inspected],
    own: ModelManifest | None = None,
    refused: Inspected | None = None,
    spare: Mapping[str, list[RingTuneError]] | None = None,
) -> list[RingTuneError]:
    """Inspect nodes at once, after one that takes no part in the run, and return the failures; fill ``spare``."""
    models, answers = AgreedModel(lambda: own), queue.SimpleQueue[RingTuneError | None]()
    if spare is not None:
        models.may_leave_out(spare, lambda node, error: spare[node].append(error))
    models.expect(nodes)
    with ExitStack() as stack:

        def inspect(name: str, node: Inspected) -> AgentCalls:
            server = Server("127.0.0.1:0", node.add_to)
            stack.callback(server.stop, 0.0)
            failed = lambda _, error: answers.put(error)  # noqa: E731
            calls = AgentCalls(
                name, server.address, "r", lease_s=60.0, wait_s=WAIT_S, on_failure=failed, nodes=nodes, models=models
            )
            stack.callback(calls.close)
            calls.inspect(control_pb2.InspectRequest(), lambda _: answers.put(None))
            return calls

        if refused is not None:
            calls = inspect("refused", refused)
            assert answers.get(timeout=WAIT_S) is None
            calls.close()
        for name, node in nodes.items():
            inspect(name, node)
        return [error for error in (answers.get(timeout=WAIT_S) for _ in nodes) if error is not None]


def test_node_without_the_model_is_told_the_one_on_which_all_others_agree(tmp_path: Path) -> None:
    """A host's folder may lack the tokenizer; those that have a copy are asked once; alone the coordinator's counts."""
    folder, bare = write_bert(tmp_path / "m"), write_bert(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    nodes = {"a": Inspected(bare), "b": Inspected(folder), "c": Inspected(None), "d": Inspected(None)}
    assert inspect_all(nodes) == []
    agreed = ModelSource(folder).manifest
    assert [node.told for node in nodes.values()] == [[""], [""], ["", agreed.sha256], ["", agreed.sha256]]
    alone = {"c": Inspected(None)}
    assert inspect_all(alone, agreed) == [] and alone["c"].told == ["", agreed.sha256]
    (error,) = inspect_all({"c": Inspected(None)})
    assert "no node has a copy of the model" in str(error)


def test_run_whose_nodes_have_different_models_is_refused_with_both(tmp_path: Path) -> None:
    """A node without a copy must not take either; the bytes that samples compare are the same."""
    folder, evil = write_bert(tmp_path / "m"), poisoned(write_bert(tmp_path / "evil"))
    nodes = {"a": Inspected(folder), "b": Inspected(evil), "c": Inspected(None)}
    (error,) = inspect_all(nodes)
    assert isinstance(error, ModelError) and nodes["c"].told == [""]
    for part in ("nodes a and b have different models: tensor ", "put the same folder on both"):
        assert part in str(error)
    assert inspect_all({"a": Inspected(folder), "c": Inspected(None)}, refused=Inspected(evil)) == []
    # Of three copies two agree: a third one is left out where its node may be, else the run is refused with both
    nodes = {"a": Inspected(evil), "b": Inspected(folder), "c": Inspected(None), "d": Inspected(folder)}
    left_out: dict[str, list[RingTuneError]] = {"a": [], "d": []}
    assert inspect_all(nodes, spare=left_out) == []
    assert nodes["c"].told == ["", ModelSource(folder).manifest.sha256] and not left_out["d"]
    assert "it has another model than most: nodes a and b have different models: tensor" in str(*left_out["a"])
    (error,) = inspect_all(nodes, spare={"b": [], "d": []})
    assert isinstance(error, ModelError) and "nodes a and b have different models" in str(error)


def test_manifest_that_can_not_be_read_is_of_its_sender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node without a copy, for which it was asked, has not sent it."""
    broken = weights_pb2.ManifestReply(files=[weights_pb2.FileEntry(name="../config.json", size_bytes=1)])
    monkeypatch.setattr(WeightsServicer, "Manifest", lambda *_: broken)
    nodes = {"a": Inspected(write_bert(tmp_path / "m")), "c": Inspected(None)}
    (error,) = inspect_all(nodes)
    assert isinstance(error, IntegrityError) and str(error).startswith("the model of node a can't be used: ")


def test_manifests_that_are_unusable_or_late_cost_the_other_nodes_nothing(tmp_path: Path) -> None:
    """The sender of an unusable one leaves in place of who asks for the digest, and all have half of the time."""
    manifest, given_s = ModelSource(write_bert(tmp_path / "m")).manifest, list[float]()

    def unusable(timeout_s: float) -> ModelManifest:
        given_s.append(timeout_s)
        raise IntegrityError("the model of node a can't be used")

    models, left_out = AgreedModel(lambda: None), list[str]()
    models.may_leave_out((), lambda node, error: left_out.append(f"{node}: {error}"))
    models.answered("a", unusable)
    models.answered("b", lambda timeout_s: manifest)
    assert models.sha256(600.0) == manifest.sha256
    assert left_out == ["a: the model of node a can't be used"] and given_s[0] <= 300.0

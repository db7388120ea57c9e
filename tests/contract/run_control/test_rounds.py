"""The coordinator's state machine: planning, phases, granting ahead, and how every run ends."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from coordinator.run.driver import raise_if_over
from ringtune.engine.events import SetTimer, TimerFired
from ringtune.errors import CapacityError, RingTuneError
from ringtune.run_control import events as rd
from ringtune.run_control.recovery import RecoveryPolicy
from ringtune.run_control.state_machine import RunStateMachine
from ringtune.run_control.turns import EvaluationSums
from ringtune.schedule.course import Generation
from ringtune.schedule.methods.hift import Hift
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, Turn, turn_sequence
from ringtune.techniques.replicas import CopyDigest
from tests.support.cases import cases
from tests.support.moves import moving
from tests.support.plans import make_plan

PLAN = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=8, local_iterations=2, eval_rows=3)


def kinds(commands: list[rd.Command]) -> list[str]:
    """Class names of commands, without timers."""
    return [type(command).__name__ for command in commands if not isinstance(command, SetTimer)]


RESUMED_ENDS = [
    (TimerFired("phase"), "b"),
    (rd.NodeFailed("b", "StorageError", "it is full"), "b"),
    (rd.NodeFailed("a", "PeerLostError", "it is lost"), "a"),
    (rd.NodeFailed("a", "DataError", "a row is wrong"), ""),
    (rd.LinkFailed(rd.NodeFailed("b", "DeadlineError", "nothing came", "a"), 0), "b"),
    (rd.RunStopRequested("enough"), ""),
]


def trained_rounds(plan: Plan = PLAN, nodes: tuple[str, ...] = ("a", "b"), **options: object) -> RunStateMachine:
    """Rounds that have just begun to train; the first grant is consumed."""
    rounds = RunStateMachine(lambda facts: plan, **options)  # type: ignore[arg-type]
    rounds.handle(rd.Started(nodes), 0.0)
    for node in nodes:
        rounds.handle(rd.Inspected(node, None), 0.0)
    for node in plan.nodes:
        rounds.handle(rd.Prepared(node), 0.0)
    assert rounds.phase == "training"
    return rounds


def test_rounds_error_of_the_planner_ends_the_run() -> None:
    """A plan that does not fit releases every node and keeps the error's class and numbers."""

    def planner(facts: object) -> Plan:
        raise CapacityError("node a needs 3 MiB and has 2 MiB")

    rounds = RunStateMachine(planner)
    rounds.handle(rd.Started(("a",)), 0.0)
    answer = rounds.handle(rd.Inspected("a", 1), 0.0)
    assert answer[-1] == rd.Finish("CapacityError", "node a needs 3 MiB and has 2 MiB")
    assert [command.node for command in answer if isinstance(command, rd.Release)] == ["a"]


@cases(("items_ahead", "expected"), [(1, 2), (4, 2), (5, 3)])
def test_rounds_grant_ahead_at_least_one_turn(items_ahead: int, expected: int) -> None:
    """Turns are granted until enough items are ahead, and always one beyond the current."""
    rounds = RunStateMachine(lambda facts: PLAN, items_ahead=items_ahead)
    rounds.handle(rd.Started(("a", "b")), 0.0)
    rounds.handle(rd.Inspected("a", None), 0.0)
    rounds.handle(rd.Inspected("b", None), 0.0)
    rounds.handle(rd.Prepared("a"), 0.0)
    grants = [command for command in rounds.handle(rd.Prepared("b"), 0.0) if isinstance(command, rd.Grant)]
    assert len(grants) == 1 and len(grants[0].turns) == expected


def test_rounds_count_the_joins_of_a_node_until_turns_have_ended() -> None:
    """More than five are too many within 50 turns; of a node that the run waits for, until the next turn has ended."""
    rounds, turn = trained_rounds(), next(turn_sequence(PLAN.course))
    for refused in [False] * 5 + [True]:
        rounds.joins.note("c")
        assert [bool(rounds.joins.refusal_reason("c", is_awaited=one)) for one in (True, False)] == [refused] * 2
    assert rounds.joins.refusal_reason("c", is_awaited=True).endswith("; resume the run when it stays up")
    for seq in range(turn.first_seq, turn.end_seq):
        values = (("count", 4.0), ("loss_sum", 2.0))
        rounds.handle(rd.StepReported(turn.owner, seq, turn.step_of(seq), turn.kind.value, values), 1.0)
    for node in ("a", "b"):
        rounds.handle(rd.TurnReported(node, turn.index), 1.0)
    assert [bool(rounds.joins.refusal_reason("c", is_awaited=one)) for one in (True, False)] == [False, True]


@cases("recovery", [None, RecoveryPolicy()])
def test_rounds_recover_and_take_nodes_in_only_with_a_policy(recovery: RecoveryPolicy | None) -> None:
    """Nodes keep copies in both runs: without a policy a loss ends the run, and a node that joins changes nothing."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=8, eval_rows=0).with_copies(True)
    rounds = trained_rounds(plan, recovery=recovery)
    assert rounds.handle(rd.NodeJoined("c"), 1.0) == []
    answer = rounds.handle(rd.NodeFailed("b", "PeerLostError", "node b is lost"), 2.0)
    bad = trained_rounds(plan, recovery=recovery).handle(rd.NodeFailed("a", "DivergedError", "the loss is nan"), 2.0)
    if recovery is not None:
        assert [command.node for command in answer if isinstance(command, rd.Halt)] == ["a", "c"]
        assert [command.node for command in bad if isinstance(command, rd.Halt)] == ["a", "b"]
    else:
        assert [command.node for command in answer if isinstance(command, rd.Release)] == ["a", "b"]
        assert answer[-1] == rd.Finish("PeerLostError", "node b is lost")
        assert bad[-1] == rd.Finish("DivergedError", "the loss is nan")


def test_rounds_go_on_without_a_host_with_digests_of_copies_that_it_does_not_have() -> None:
    """It is an error of its own, as scores of blocks that it does not host are; one digest too much ended the run."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=8, eval_rows=0).with_copies(True)
    rounds = trained_rounds(plan, recovery=RecoveryPolicy())
    answer = rounds.handle(rd.TurnReported("b", 0, copies=(CopyDigest(2, "f" * 64),)), 1.0)
    assert [command.node for command in answer if isinstance(command, rd.LogNodeError)] == ["b"]
    assert [command.node for command in answer if isinstance(command, rd.Halt)] == ["a"]


def test_rounds_log_what_was_trained_with_the_end_of_its_turn() -> None:
    """A resumed run compares the disks with it; it is of who trained a block, and of this turn."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=8, eval_rows=0, method="all").with_copies(True)
    rounds, last = trained_rounds(plan, recovery=RecoveryPolicy()), tuple[CopyDigest, ...]()
    for turn in itertools.islice(turn_sequence(plan.course), 2):
        for seq in range(turn.first_seq, turn.end_seq):
            rounds.handle(rd.StepReported("a", seq, turn.step_of(seq), "train", (("count", 4.0),)), 1.0)
        digests = {unit: f"{turn.index}{unit}" * 32 for unit in (0, 2, plan.course.head)}
        by_a, by_b = ([CopyDigest(unit, digests[unit]) for unit in units] for units in ((0, plan.course.head), (2,)))
        rounds.handle(rd.TurnReported("b", turn.index, kept=(*by_b, CopyDigest(0, "f" * 64))), 2.0)
        answer = rounds.handle(rd.TurnReported("a", turn.index, kept=tuple(by_a)), 2.0)
        kept = [command for command in answer if isinstance(command, rd.LogKept)]
        assert [command.step for command in kept] == [turn.end_step]
        assert kept[0].digests == tuple(CopyDigest(*each) for each in sorted(digests.items())) != last
        last = kept[0].digests


def test_rounds_have_no_bad_step_of_a_node_without_a_part() -> None:
    """Nobody goes back for what a node says that has joined; after another bad step the books lacked what was done."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=8, eval_rows=0).with_copies(True)
    rounds = trained_rounds(plan, recovery=RecoveryPolicy())
    answer = rounds.handle(rd.NodeFailed("b", "DivergedError", "the loss is nan"), 1.0)
    for answered in (rd.Halted, rd.Moved):
        for node in ("a", "b"):
            answer = rounds.handle(answered(node, 1), 2.0)
    (turn, *_), *_ = [command.turns for command in answer if isinstance(command, rd.Grant)]
    rounds.handle(rd.StepReported("a", turn.first_seq, 0, "train", (("count", 4.0),)), 3.0)
    rounds.handle(rd.NodeJoined("c"), 4.0)
    assert kinds(rounds.handle(rd.NodeFailed("c", "DivergedError", "no"), 5.0)) == ["Release"]
    rounds.handle(rd.TurnReported("a", turn.index), 6.0)
    told = rounds.handle(rd.TurnReported("b", turn.index), 6.0)
    assert [command.step for command in told if isinstance(command, rd.LogStep)] == [0]


def test_rounds_take_an_error_that_a_host_repeats_for_its_own() -> None:
    """It joins again and fails once more before a turn is done: that is no second node with an error of the job."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=8, eval_rows=0).with_copies(True)
    rounds = trained_rounds(plan, recovery=RecoveryPolicy())
    for message in ("no room", "no room again"):
        answer = rounds.handle(rd.NodeFailed("b", "StorageError", message), 1.0)
        assert rd.LogNodeError("b", "StorageError", message) in answer and rounds.phase == "moving"
        rounds.handle(rd.NodeJoined("b"), 2.0)


@cases("node", ["a", "b"])
def test_rounds_go_on_without_a_host_that_never_says_that_it_has_done_a_turn(node: str) -> None:
    """It sends all that others wait for, so that nobody misses it; an owner that the run needs ends it."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=8, eval_rows=0).with_copies(True)
    rounds = trained_rounds(plan, recovery=RecoveryPolicy(), wait_s=5.0)
    rounds.handle(rd.TurnReported("b" if node == "a" else "a", 0), 1.0)
    answer = rounds.handle(TimerFired("phase"), 8.5)
    late = f"waited 7.5 s for turn 0 of node a (from step 0): not done by {node}"
    if node == "b":
        assert rd.LogNodeError("b", "DeadlineError", late) in answer and rd.Halt("a", 1) in answer
    else:
        assert answer[-1] == rd.Finish("DeadlineError", late)


@cases("node", ["a", "b"])
def test_rounds_of_all_parameters_end_with_a_silent_host_for_another_run_to_continue_without_it(node: str) -> None:
    """From the last checkpoint; a silent owner of rows ends it."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=8, local_iterations=2, method=Hift())
    rounds = trained_rounds(plan.with_copies(True), recovery=RecoveryPolicy(), wait_s=5.0)
    rounds.handle(rd.TurnReported("b" if node == "a" else "a", 0), 1.0)
    late = f"waited 7.5 s for turn 0 of node a (from step 0): not done by {node}"
    assert rounds.handle(TimerFired("phase"), 8.5)[-1] == rd.Finish("DeadlineError", late)
    assert rounds.lost == ("b" if node == "b" else "")


def test_rounds_go_on_without_the_host_from_which_a_silent_owner_awaits_its_first_tensor() -> None:
    """An owner without blocks does not miss it, as its turn may come late; one that lies so costs one host."""
    plan = make_plan([("b", 0, 2), ("c", 2, 4)], ["a"], num_steps=16, eval_rows=0).with_copies(True)
    rounds = trained_rounds(plan, ("a", "b", "c"), recovery=RecoveryPolicy(), wait_s=5.0)
    for node in ("b", "c"):
        rounds.handle(rd.TurnReported(node, 0), 1.0)
    answer = rounds.handle(TimerFired("phase"), 8.5)
    late = "waited 7.5 s for turn 0 of node a (from step 0): not done by a"
    assert rd.LogNodeError("c", "DeadlineError", late) in answer and rd.Release("c", late) in answer
    assert rounds._openings.has_cost(["a"], "b") and rounds.phase == "moving"


@cases(("event", "lost"), RESUMED_ENDS)
def test_rounds_of_a_resumed_run_say_without_which_node_another_run_continues(event: rd.Event, lost: str) -> None:
    """No turn is kept yet. A host that only withholds its last word, or has a full disk, is one as well."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=8, eval_rows=0).with_copies(True)
    start = StartPoint.of(plan.course, step=plan.course.local_iterations)
    rounds = trained_rounds(plan, recovery=RecoveryPolicy(awaits_s=9.0), wait_s=5.0, start=start)
    assert not rounds.lost
    rounds.handle(rd.TurnReported("a", 0), 1.0)
    assert isinstance(rounds.handle(event, 8.5)[-1], rd.Finish)
    assert rounds.lost == lost
    rounds = trained_rounds(plan, recovery=RecoveryPolicy())  # it keeps its beginning
    rounds.handle(rd.NodeFailed("a", "PeerLostError", "it is lost"), 1.0)
    assert rounds.phase == "failed" and not rounds.lost


@cases("leaves_out", [True, False])
def test_rounds_go_on_without_an_owner_that_never_moves_where_its_rows_may_be_left_out(leaves_out: bool) -> None:
    """It says that it can't reach somebody, and names no node: the deadline of the recovery says for whom it waited."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "c"], num_steps=8, eval_rows=0).with_copies(True)
    rounds = trained_rounds(plan, ("a", "b", "c"), recovery=RecoveryPolicy(leaves_out=leaves_out), wait_s=5.0)
    rounds.handle(rd.NodeFailed("a", "DivergedError", "the loss is nan"), 1.0)
    for node in ("a", "b"):
        rounds.handle(rd.Halted(node, 1), 1.0)
    rounds.handle(rd.MoveFailed("c", 1, "ConnectionFailedError", "no way"), 1.0)
    answer = rounds.handle(TimerFired("phase"), 8.5)
    late = "waited 7.5 s for node c to stop after a bad step: no way"
    if leaves_out:
        assert rd.Release("c", late) in answer and rounds.phase == "moving"
    else:
        assert answer[-1] == rd.Finish("DeadlineError", f"{late}; start it again and --resume the run")


def test_rounds_are_stopped_by_no_node() -> None:
    """The run ends with an ordinary error of the owner, not as one that its user has stopped; a measurement too."""
    stop, told = (rd.NodeFailed("a", name, "no") for name in ("InterruptedRunError", "RingTuneError"))
    assert trained_rounds().handle(stop, 1.0)[-1] == rd.Finish("RingTuneError", "no")
    assert rd.without_stop(rd.LinkFailed(stop, 0)) == rd.LinkFailed(told, 0)
    moved = rd.MoveFailed("a", 0, "InterruptedRunError", "no")
    assert rd.without_stop(moved) == moved._replace(error="RingTuneError")
    with pytest.raises(RingTuneError) as caught:
        raise_if_over(stop)
    assert type(caught.value) is RingTuneError


@pytest.mark.promise("6 every wait ends")
@cases("phase", ["inspecting", "preparing", "training"])
def test_rounds_deadline_names_who_is_awaited(phase: str) -> None:
    """If a phase makes no progress, the error names the phase or turn and the silent node."""
    rounds = RunStateMachine(lambda facts: PLAN, wait_s=5.0)
    rounds.handle(rd.Started(("a", "b")), 0.0)
    rounds.handle(rd.Inspected("a", None), 0.0)
    if phase != "inspecting":
        rounds.handle(rd.Inspected("b", None), 0.0)
        rounds.handle(rd.Prepared("a"), 0.0)
    if phase == "training":
        rounds.handle(rd.Prepared("b"), 0.0)
        rounds.handle(rd.TurnReported("a", 0), 0.0)
    answer = rounds.handle(TimerFired("phase"), 6.0)
    assert isinstance(answer[-1], rd.Finish) and answer[-1].error == "DeadlineError"
    assert "b" in answer[-1].message.rsplit("node", 1)[-1] or "done by b" in answer[-1].message


@pytest.mark.promise("6 every wait ends")
def test_rounds_deadline_is_not_moved_by_a_node_that_repeats_the_end_of_a_later_turn() -> None:
    """A host that never ends the oldest turn, and reports the next one over and over, would keep the run for ever."""
    rounds = trained_rounds(wait_s=5.0)
    first = rounds.handle(rd.TurnReported("b", 1), 1.0)
    assert first == [SetTimer("phase", 8.5)]
    assert [rounds.handle(rd.TurnReported("b", 1), now_s) for now_s in (2.0, 3.0)] == [[], []]
    assert rounds.handle(rd.TurnReported("stranger", 1), 4.0) == []


@pytest.mark.promise("6 every wait ends")
def test_rounds_every_phase_sets_its_deadline() -> None:
    """Each phase begins with a timer, half as long again as the calls, which name the silent node."""
    rounds = RunStateMachine(lambda facts: PLAN, wait_s=10.0)
    timers = [rounds.handle(rd.Started(("a", "b")), 1.0)]
    timers.append(rounds.handle(rd.Inspected("a", None), 2.0) + rounds.handle(rd.Inspected("b", None), 2.0))
    timers.append(rounds.handle(rd.Prepared("a"), 3.0) + rounds.handle(rd.Prepared("b"), 3.0))
    found = [[command.at_s for command in commands if isinstance(command, SetTimer)] for commands in timers]
    assert found == [[16.0], [17.0], [18.0]]


def test_rounds_take_counts_of_classes_for_one_item_of_a_turn() -> None:
    """An owner adds them up; a table for each of its items would fill the coordinator's memory until the end."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=2, eval_rows=12)
    rounds, turn = trained_rounds(plan, items_ahead=100), list(turn_sequence(plan.course))[-1]
    for seq, counts in ((0, 1), (0, 1), (1, 0), (2, 1)):
        assert rounds.phase == "training"
        values = (("count", 4.0), *[("class:0:1", 1.0)] * counts)
        answer = rounds.handle(rd.StepReported("a", turn.first_seq + seq, 2, "evaluate", values), 1.0)
    finish = answer[-1]
    assert isinstance(finish, rd.Finish) and finish.error == "IntegrityError"
    assert finish.message.startswith("node a reports counts of classes for 2 items of one turn; ")


@cases("order", [[0, 1, 2, 2], [2, 0, 1, 0], [1, 2, 0, 1]])
def test_rounds_evaluation_is_summed_in_the_order_of_items(order: list[int]) -> None:
    """Whichever item is reported first, the sums are bit-equal; a repeated report counts once."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=2, eval_rows=12)
    rounds = trained_rounds(plan, items_ahead=100)
    turns = list(turn_sequence(plan.course))
    losses = [1e17, 0.1, -1e17]
    for index in order:
        rounds.handle(rd.StepReported("a", turns[-1].first_seq + index, 2, "evaluate", (("loss", losses[index]),)), 1.0)
    log: list[rd.Command] = []
    for turn in turns:
        for node in ("a", "b"):
            log += rounds.handle(rd.TurnReported(node, turn.index), 1.0)
    assert [entry.values for entry in log if isinstance(entry, rd.LogEvaluation)] == [(("loss", 1e17 + 0.1 - 1e17),)]


def test_evaluation_has_the_rows_of_all_owners_once() -> None:
    """Whoever reports ahead of the next one: here all items of both are reported first."""
    plan = make_plan([("a", 0, 4)], ["a", "b"], num_steps=4, local_iterations=2, eval_every=2, eval_rows=2)
    turns = [turn for turn in turn_sequence(plan.course) if turn.kind is StepKind.EVALUATE]
    sums = EvaluationSums()
    for turn in turns:
        sums.note(turn.first_seq, (("count", 2.0),))
    assert [sums.close(turn, plan.course) for turn in turns] == [None, (("count", 4.0),)] * 2


def test_evaluation_keeps_the_values_of_open_turns_alone() -> None:
    """A million texts have as many turns, and most of their tokens have no values."""
    texts = Generation(rows=50, max_new_tokens=3, at_once=1, alone=True)
    plan = make_plan([("a", 0, 4)], ["a", "b"], num_steps=0, eval_rows=50)
    course, sums = dataclasses.replace(plan.course, generation=texts), EvaluationSums()
    turns = list(turn_sequence(course))
    for turn in turns:
        for seq in range(turn.first_seq, turn.end_seq):
            sums.note(seq, (("generated", 1.0), ("rouge_l_sum", 0.1)) if seq == turn.end_seq - 1 else ())
        told = sums.close(turn, course)
        assert sum(len(value) for value in vars(sums).values() if isinstance(value, dict | set)) <= 2
    assert len(turns) == 100 and told == (("generated", 100.0), ("rouge_l_sum", sum([0.1] * 100)))


AUTO = make_plan([("a", 0, 4)], ["a"], num_steps=14, unfreeze="auto", patience_steps=2, eval_rows=0, checkpoint_every=4)


def done(rounds: RunStateMachine, turn: Turn, loss: float = 1.0) -> list[rd.Command]:
    """The only node has done a turn: its last word first, then the losses of its steps."""
    answer = rounds.handle(rd.TurnReported("a", turn.index), 1.0)
    for seq in range(turn.first_seq, turn.end_seq):
        values = (("count", 4.0), ("loss_sum", 4 * loss))
        answer += rounds.handle(rd.StepReported("a", seq, turn.step_of(seq), turn.kind.value, values), 1.0)
    return answer


def test_rounds_that_decide_grant_a_turn_when_all_losses_it_rests_on_are_known() -> None:
    """Two train turns are granted at the start; each next one when that before the last is closed, losses and all."""
    rounds = RunStateMachine(lambda facts: AUTO, items_ahead=100)
    rounds.handle(rd.Started(("a",)), 0.0)
    rounds.handle(rd.Inspected("a", None), 0.0)
    granted: list[Turn] = []
    log: list[rd.Command] = []
    at = 0
    answer = rounds.handle(rd.Prepared("a"), 0.0)
    while True:
        granted += [turn for command in answer if isinstance(command, rd.Grant) for turn in command.turns]
        log += answer
        if at == len(granted):
            break
        known = sum(turn.kind is StepKind.TRAIN for turn in granted[:at])
        assert sum(turn.kind is StepKind.TRAIN for turn in granted) == min(7, known + 2)
        answer = done(rounds, granted[at])
        at += 1
    # a patience of one turn of two steps: turn 0 is the best one, what turn 1 decides holds from turn 3 on
    decided = [((), 0), ((), 2), ((), 4), ((6,), 6), ((6,), 8), ((6, 10), 10), ((6, 10), 12)]
    trained = [turn for turn in granted if turn.kind is StepKind.TRAIN]
    assert [(turn.unfreeze_at, turn.first_step) for turn in trained] == decided
    saved = [turn for turn in granted if turn.kind is StepKind.CHECKPOINT]
    assert [(turn.unfreeze_at, turn.first_step) for turn in saved] == [((), 4), ((6,), 8), ((6, 10), 12), ((6, 10), 14)]
    assert [command for command in log if isinstance(command, rd.LogUnfreeze)] == [
        rd.LogUnfreeze(6, 2),
        rd.LogUnfreeze(10, 3),
    ]
    depths = {command.step: command.depth for command in log if isinstance(command, rd.LogStep)}
    assert (depths[4], depths[6], depths[10]) == (1, 2, 3)
    assert rounds.unfreeze_at == (6, 10)
    assert kinds(log)[-1] == "Collect"


@pytest.mark.promise("6 every wait ends")
def test_rounds_deadline_names_the_owner_whose_loss_is_missing() -> None:
    """All nodes are done with the turn, but one of its steps was never reported."""
    rounds = trained_rounds(AUTO, ("a",))
    rounds.handle(rd.TurnReported("a", 0), 1.0)
    (finish,) = [entry for entry in rounds.handle(TimerFired("phase"), 1e9) if isinstance(entry, rd.Finish)]
    assert finish.error == "DeadlineError" and finish.message.endswith("not done by a")


def test_rounds_wait_for_a_result_as_long_as_it_comes() -> None:
    """A big model over a slow link takes many times ``wait_s``; one that stops is given up behind its call."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=0, eval_rows=0)
    rounds = RunStateMachine(lambda facts: plan, wait_s=300.0)
    rounds.handle(rd.Started(("a", "b")), 0.0)
    for event in (rd.Inspected("a", None), rd.Inspected("b", None), rd.Prepared("a"), rd.Prepared("b")):
        rounds.handle(event, 0.0)
    assert rounds.phase == "collecting"
    for now_s in (200.0, 400.0, 600.0, 800.0):
        assert rounds.handle(rd.Progressed("a"), now_s) == [SetTimer("phase", now_s + 450.0)]
    rounds.handle(rd.Collected("a"), 900.0)
    assert rounds.handle(rd.Progressed("a"), 900.0) == [], "it is done, the other one is waited for"
    assert rounds.handle(rd.Progressed("b"), 1000.0) == [SetTimer("phase", 1450.0)]
    answer = rounds.handle(TimerFired("phase"), 1450.0)
    assert answer[-1] == rd.Finish("DeadlineError", "waited 450 s in phase collecting for node b")


def test_rounds_wait_for_a_result_to_be_loaded_as_long_as_it_goes() -> None:
    """An evaluation sends each node its part first; while it trains, progress of bytes means nothing."""
    rounds = RunStateMachine(lambda facts: PLAN, wait_s=300.0)
    rounds.handle(rd.Started(("a", "b")), 0.0)
    for node in ("a", "b"):
        rounds.handle(rd.Inspected(node, None), 0.0)
    assert rounds.handle(rd.Progressed("b"), 250.0) == [SetTimer("phase", 700.0)]
    for node in ("a", "b"):
        rounds.handle(rd.Prepared(node), 500.0)
    assert rounds.phase == "training"
    assert rounds.handle(rd.Progressed("b"), 501.0) == []


@cases(("node", "step", "kind"), [("b", 0, "train"), ("a", 1 << 62, "train"), ("a", 1, "train"), ("a", 0, "score")])
def test_rounds_refuse_a_step_in_another_name_or_of_another_turn(node: str, step: int, kind: str) -> None:
    """The run ends at once with the node named: a figure of somebody else would be written down as the owner's.

    Of one kind a loss may be infinite.
    """
    rounds = trained_rounds()
    told = rounds.handle(rd.StepReported(node, 0, step, kind, (("count", 4.0),)), 1.0)
    (finish,) = [command for command in told if isinstance(command, rd.Finish)]
    assert finish.error == "IntegrityError" and f"node {node} reports item 0 of step {step}" in finish.message


def planning(**options: float) -> tuple[RunStateMachine, list[rd.Command]]:
    """Rounds that have just asked for a plan at second 2, and what they answered."""
    rounds = RunStateMachine(None, wait_s=10.0, **options)  # type: ignore[arg-type]
    rounds.handle(rd.Started(("a", "b", "z")), 1.0)
    rounds.handle(rd.Inspected("b", "of b"), 1.0)
    rounds.handle(rd.Inspected("z", "of z"), 1.0)
    return rounds, rounds.handle(rd.Inspected("a", "of a"), 2.0)


def test_rounds_whose_copies_are_on_disks_end_with_a_lost_host() -> None:
    """Where all parameters train: the run can be resumed without it, and lines are logged as they come."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=8, local_iterations=2, method=Hift())
    rounds = trained_rounds(plan.with_copies(True), recovery=RecoveryPolicy())
    commands = rounds.handle(rd.NodeFailed("a", "PeerLostError", "node b is lost", "b"), 1.0)
    assert kinds(commands)[-1] == "Finish" and rounds.phase == "failed"


@cases(("node", "error"), [("b", ""), ("a", "DataError")])
def test_rounds_begin_without_an_owner_that_is_back_and_can_not_take_part(node: str, error: str) -> None:
    """Whatever its error is; that of a node which the run needs ends it."""
    rounds = RunStateMachine(lambda facts: PLAN.at(0), recovery=RecoveryPolicy())
    rounds.handle(rd.Started(("a", "b"), (), ("b",)), 0.0)
    commands = rounds.handle(rd.NodeFailed(node, "DataError", f"node {node} has other rows"), 1.0)
    assert rd.Release(node, f"node {node} has other rows") in commands
    assert [command.error for command in commands if isinstance(command, rd.Finish)] == [error] * bool(error)
    assert (rounds.phase == "inspecting") == (not error)


@cases(("placement_number", "finish"), [(0, "PlanError"), (1, "")])
def test_rounds_of_all_parameters_move_between_two_runs_only(placement_number: int, finish: str) -> None:
    """A plan with a later placement is refused, one of a resumed run that begins in its last placement is not."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a", "b"], num_steps=8, local_iterations=2, method=Hift())
    plan = moving(plan, (1, [("b", 0, 2), ("a", 2, 4)]))
    start = StartPoint.of(plan.course, step=2, holder="a", placement_number=placement_number)
    rounds = RunStateMachine(lambda facts: plan, start=start)
    rounds.handle(rd.Started(("a", "b")), 0.0)
    rounds.handle(rd.Inspected("a", None), 0.0)
    found = [one for one in rounds.handle(rd.Inspected("b", None), 0.0) if isinstance(one, rd.Finish)]
    assert [one.error for one in found] == [finish] * bool(finish)
    assert all("hift trains all parameters" in one.message for one in found)


@cases(
    ("event", "error"),
    [
        (rd.PlanFailed("CapacityError", "it does not fit"), "CapacityError"),
        (rd.RunStopRequested("enough"), "InterruptedRunError"),
        (rd.DrainRequested("enough"), "InterruptedRunError"),
        (rd.NodeFailed("b", "PeerLostError", "node b is lost"), "PeerLostError"),
        (TimerFired("phase"), "DeadlineError"),
    ],
)
def test_rounds_end_while_the_driver_plans(event: rd.Event, error: str) -> None:
    """Whatever ends a run ends it during planning too, and a plan that comes later changes nothing."""
    rounds, _ = planning(plan_s=60.0)
    finish = rounds.handle(event, 3.0)[-1]
    assert isinstance(finish, rd.Finish) and finish.error == error
    assert rounds.handle(rd.PlanMade(PLAN), 4.0) == []

"""The node's engine, event by event."""

from __future__ import annotations

import tracemalloc

import pytest

from ringtune.engine import events as ev
from ringtune.engine.node_engine import NodeEngine
from ringtune.errors import FrameError
from ringtune.schedule.actions import Action, Op, Payload, TensorKey
from ringtune.schedule.plan import Plan
from ringtune.schedule.turns import StartPoint, StepKind, Turn, items, turn_sequence
from tests.support.cases import cases
from tests.support.plans import make_plan

HIDDEN, GRAD = Payload.HIDDEN, Payload.GRAD


def host_plan(**changes: int) -> Plan:
    """Node b hosts [2, 4) of 4 blocks for owner c; only block 3 trains at first."""
    options: dict[str, int] = {"num_steps": 6, "local_iterations": 6, "every_steps": 99, "microbatches": 1} | changes
    return make_plan([("a", 0, 2), ("b", 2, 4)], ["c"], eval_rows=0, **options)  # type: ignore[arg-type]


class EngineDriver:
    """Feeds an engine and finishes its actions on demand."""

    def __init__(self, plan: Plan, node: str, *, grant: int = 99, start: StartPoint | None = None) -> None:
        self.engine = NodeEngine(plan, node, wait_s=100.0, start=start)
        self.running: Action | None = None
        self.log: list[ev.Command] = []
        for turn in list(turn_sequence(plan.course, start=start))[:grant]:
            self.tell(ev.TurnGranted(turn))

    def tell(self, event: ev.Event, now_s: float = 0.0) -> list[ev.Command]:
        """Feed one event; remembers what runs."""
        commands = self.engine.handle(event, now_s)
        self.log += commands
        for command in commands:
            if isinstance(command, ev.RunAction):
                assert self.running is None
                self.running = command.action
        return commands

    def arrive(self, payload: str, seq: int, micro: int, boundary: int, source: str) -> list[ev.Command]:
        """A tensor arrives."""
        return self.tell(ev.TensorArrived(TensorKey(payload, seq, micro, boundary), source))

    def done(self, **values: float) -> list[ev.Command]:
        """The running action ends."""
        assert self.running is not None
        action, self.running = self.running, None
        return self.tell(ev.ActionDone(action, tuple(sorted(values.items()))))

    def step(self, op: Op, start: int = 0, stop: int = 0) -> None:
        """Check which action runs, and end it."""
        assert self.running is not None
        assert (self.running.op, self.running.start, self.running.stop) == (op, start, stop)
        self.done()


@cases("hidden_came", [False, True])
@cases("is_granted", [False, True])
def test_engine_gradient_before_its_hidden_state_is_an_error_that_names_its_sender(
    hidden_came: bool, is_granted: bool
) -> None:
    """The plan foresees it, but c can't have it yet: without the error b would wait for a gradient that has come."""
    plan = host_plan()
    driver = EngineDriver(plan, "b", grant=0)
    if is_granted:
        driver.tell(ev.TurnGranted(next(turn_sequence(plan.course))))
    if hidden_came:
        driver.arrive(HIDDEN, 0, 0, 2, "a")
    with pytest.raises(
        FrameError, match=r"node c sent the gradient of item 0, micro-batch 0, block 4 before"
    ) as refused:
        driver.tell(ev.TensorArrived(TensorKey(GRAD, 0, 0, 4), "c"))
    assert refused.value.peer == "c"


def test_engine_item_without_update_waits_until_the_one_before_has_freed_its_graphs() -> None:
    """No version holds it back, as scores change no weight; the memory of a host is planned for the graphs of one."""
    driver = EngineDriver(host_plan(), "b", grant=0)
    turn = Turn(index=0, kind=StepKind.SCORE, owner="c", round=0, first_seq=0, num_items=2, first_step=0, first_batch=0)
    driver.tell(ev.TurnGranted(turn))
    driver.arrive(HIDDEN, 0, 0, 2, "a")
    driver.arrive(HIDDEN, 1, 0, 2, "a")
    driver.step(Op.FORWARD, 2, 4)
    assert driver.running is None
    driver.arrive(GRAD, 0, 0, 4, "c")
    driver.step(Op.BACKWARD, 2, 4)
    driver.step(Op.FORWARD, 2, 4)


def test_engine_out_of_order_arrival_waits_for_the_older_micro_batch() -> None:
    """Item 1 may not pass item 0 at a block."""
    driver = EngineDriver(host_plan(), "b")
    driver.arrive(HIDDEN, 1, 0, 2, "a")
    assert driver.running is None
    driver.arrive(HIDDEN, 0, 0, 2, "a")
    assert driver.running is not None and driver.running.seq == 0


def test_engine_credits_that_it_does_not_lack_put_no_deadline_off() -> None:
    """A peer that returns more of them than it got hidden states is awaited no longer than a silent one."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["c"], method="all", num_steps=1, microbatches=1, eval_rows=0)
    driver = EngineDriver(plan, "a")
    driver.arrive(HIDDEN, 0, 0, 0, "c")
    driver.step(Op.FORWARD, 0, 2)
    (timer, until_s), *_ = (command for command in reversed(driver.log) if isinstance(command, ev.SetTimer))
    for boundary in (2, 2, 9):
        driver.engine.handle(ev.CreditArrived(boundary, "b"), until_s - 1.0)
    (later,) = driver.engine.handle(ev.TimerFired(timer), until_s)
    assert isinstance(later, ev.SetTimer)  # one of them was lacking
    for boundary in (2, 9):
        driver.engine.handle(ev.CreditArrived(boundary, "b"), later.at_s - 1.0)
    found = driver.engine.handle(ev.TimerFired(timer), later.at_s)
    assert [command.error for command in found if isinstance(command, ev.Fail)] == ["DeadlineError"]
    awaited = driver.engine.awaited()
    assert awaited is not None and awaited.peer == "b"


def test_engine_head_that_was_passed_on_is_not_used_for_a_later_turn() -> None:
    """Equal versions are not enough: after an evaluation the head has to come back before it trains."""
    plan = make_plan(
        [("a", 0, 4)],
        ["c", "d", "e"],
        num_steps=2,
        local_iterations=1,
        microbatches=1,
        batch_size=1,
        eval_rows=1,
        eval_every=1,
    )
    turns = list(turn_sequence(plan.course))[:5]
    assert "".join(f"{turn.kind[0]}{turn.owner} " for turn in turns) == "tc ec ed ee td "
    driver = EngineDriver(plan, "d", grant=5)
    driver.step(Op.EMBED, -1, 0)
    driver.tell(ev.HeadArrived(2, "c"))
    driver.step(Op.EMBED, -1, 0)
    assert ev.AcceptHead(2, "c") in driver.log and ev.SendHead(3, "e") in driver.log
    driver.arrive(HIDDEN, turns[2].first_seq, 0, 4, "a")
    driver.step(Op.HEAD, 4, 5)
    driver.arrive(HIDDEN, turns[4].first_seq, 0, 4, "a")
    assert driver.running is None and "from node e" in driver.engine.waiting_for()
    driver.tell(ev.HeadArrived(4, "e"))
    driver.step(Op.HEAD, 4, 5)


def test_engine_first_owner_after_a_recovery_awaits_the_head_from_its_holder() -> None:
    """No turn before it is known at the node, but who has the head is."""
    plan = make_plan([("a", 0, 4)], ["c", "d"], num_steps=4, local_iterations=1, microbatches=1, eval_rows=0)
    driver = EngineDriver(plan, "d", grant=1, start=StartPoint.of(plan.course, step=1, holder="c"))
    driver.step(Op.EMBED, -1, 0)
    driver.arrive(HIDDEN, 0, 0, 4, "a")
    awaited = driver.engine.awaited()
    assert driver.running is None and awaited is not None
    assert awaited.peer == "c" and awaited.text.startswith("the head of step 1 ") and "from node c" in awaited.text


def test_engine_repeated_grant_changes_nothing() -> None:
    """A turn that is granted twice is worked on once."""
    plan = host_plan()
    driver = EngineDriver(plan, "b")
    assert driver.tell(ev.TurnGranted(next(turn_sequence(plan.course)))) == []


@pytest.mark.promise("6 every wait ends")
def test_engine_wait_ends_with_what_was_awaited() -> None:
    """Without progress for ``wait_s`` the engine gives up and names message, step and peer."""
    driver = EngineDriver(host_plan(), "b")
    timers = [command for command in driver.log if isinstance(command, ev.SetTimer)]
    assert timers == [ev.SetTimer("wait", 100.0)]
    driver.tell(ev.TensorArrived(TensorKey(HIDDEN, 0, 0, 2), "a"), 40.0)
    assert driver.tell(ev.TimerFired("wait"), 100.0) == [ev.SetTimer("wait", 200.0)]
    driver.done()
    driver.done()
    (failure,) = driver.tell(ev.TimerFired("wait"), 300.0)
    assert isinstance(failure, ev.Fail) and failure.error == "DeadlineError"
    assert (
        failure.message
        == "node b waited 100 s for the gradient of step 0 (train), micro-batch 0, at block 4, from node c"
    )


def test_engine_wait_ends_at_the_moment_of_its_timer() -> None:
    """Also where the difference of two times is rounded to less than the wait: the timer was set anew without end."""
    now_s = 392.1538465043855
    assert (now_s + 300.0) - now_s < 300.0
    plan = host_plan()
    engine, turn = NodeEngine(plan, "b", wait_s=300.0), next(turn_sequence(plan.course))
    (timer,) = [each for each in engine.handle(ev.TurnGranted(turn), now_s) if isinstance(each, ev.SetTimer)]
    (failure,) = engine.handle(ev.TimerFired("wait"), timer.at_s)
    assert isinstance(failure, ev.Fail)


@pytest.mark.promise("7 bounded memory")
def test_engine_holds_little_of_each_item_of_an_evaluation() -> None:
    """All are granted at once, up to 262,144; four queues of each, empty at a host, took 2.5 KB."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["a"], num_steps=0, eval_rows=4_000, batch_size=4, microbatches=1)
    engine, turn = NodeEngine(plan, "b", wait_s=100.0), next(turn_sequence(plan.course))
    items(plan.course, turn)  # kept for others
    tracemalloc.start()
    try:
        engine.handle(ev.TurnGranted(turn), 0.0)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert turn.num_items == 1000 and held_bytes < 2000 * turn.num_items


def test_engine_owner_that_hosts_nothing_gives_up_only_in_its_own_turn() -> None:
    """While another owner trains there is nothing to see for node d; once its own turn has begun it waits like all."""
    plan = make_plan([("a", 0, 2), ("b", 2, 4)], ["c", "d"], num_steps=4, local_iterations=2, microbatches=1)
    driver = EngineDriver(plan, "d", grant=2)
    driver.step(Op.EMBED, -1, 0)
    driver.step(Op.EMBED, -1, 0)
    for at_s in (100.0, 200.0, 300.0):
        assert driver.tell(ev.TimerFired("wait"), at_s) == [ev.SetTimer("wait", at_s + 100.0)]
    driver.tell(ev.HeadArrived(1, "c"), 310.0)
    driver.arrive(HIDDEN, 2, 0, 4, "b")
    driver.step(Op.HEAD, 4, 5)
    driver.step(Op.UPDATE, 4, 5)
    (failure,) = driver.tell(ev.TimerFired("wait"), 500.0)
    assert isinstance(failure, ev.Fail)
    assert "hidden state of step 3" in failure.message


def test_engine_is_silent_after_stop() -> None:
    """A stopped engine answers nothing."""
    driver = EngineDriver(host_plan(), "b")
    driver.tell(ev.StopRequested("released"))
    assert driver.arrive(HIDDEN, 0, 0, 2, "a") == []

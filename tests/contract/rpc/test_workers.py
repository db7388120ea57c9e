"""Threads of a server: as many as there are calls at a time, used again, and ended in time."""

from __future__ import annotations

import threading

import pytest

from ringtune.rpc.workers import Workers

WAIT_S = 30.0


def test_workers_start_a_thread_only_when_none_is_free() -> None:
    """Calls one after another share one thread; calls at a time have one each, up to the limit."""
    workers = Workers(3, "test")
    names = {workers.submit(lambda: threading.current_thread().name).result(WAIT_S) for _ in range(20)}
    assert len(names) <= 2  # a thread may be about to be free when the next call comes
    begun, go_on = threading.Semaphore(0), threading.Event()

    def call() -> bool:
        begun.release()
        return go_on.wait(WAIT_S)

    futures = [workers.submit(call) for _ in range(5)]
    assert all(begun.acquire(timeout=WAIT_S) for _ in range(3))
    assert not begun.acquire(blocking=False)
    go_on.set()
    assert all(future.result(WAIT_S) for future in futures)
    assert workers.close(WAIT_S)


def test_workers_pass_results_and_errors_on() -> None:
    """Arguments go in, results and errors come out, and the thread serves the next call."""
    workers = Workers(1, "test")
    with pytest.raises(ZeroDivisionError):
        workers.submit(divmod, 7, 0).result(WAIT_S)
    assert workers.submit(divmod, 7, 2).result(WAIT_S) == (3, 1)
    assert workers.close(WAIT_S)


@pytest.mark.promise("6 every wait ends")
def test_workers_close_in_time_and_take_nothing_afterwards() -> None:
    """What waits is cancelled, a call under way is waited for so long and no longer."""
    workers = Workers(1, "test")
    begun, go_on = threading.Event(), threading.Event()

    def call() -> bool:
        begun.set()
        return go_on.wait(WAIT_S)

    under_way, waiting = workers.submit(call), workers.submit(call)
    assert begun.wait(WAIT_S)
    assert not workers.close(0.0)
    assert waiting.cancelled() and workers.submit(call).cancelled()
    go_on.set()
    assert under_way.result(WAIT_S)
    assert workers.close(WAIT_S)


def test_workers_without_a_thread_left_let_calls_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """``submit`` does not raise, because gRPC's own thread would end with it; a free thread takes the call later."""
    workers = Workers(5, "test")
    begun, go_on = threading.Event(), threading.Event()

    def call() -> bool:
        begun.set()
        return go_on.wait(WAIT_S)

    first = workers.submit(call)
    assert begun.wait(WAIT_S)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        second = workers.submit(call)
    assert not second.done()
    go_on.set()
    assert first.result(WAIT_S) and second.result(WAIT_S)
    assert workers.close(WAIT_S)

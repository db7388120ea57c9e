"""The simulator's answers to the page's sliders: one question at a time, each with a time limit.

The simulator has a process of its own, which starts with the first question and is killed if it takes too long. Answers
are cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from coordinator.web.page_state import PageState
from ringtune.costs.memory_sizes import MemorySettings
from ringtune.errors import BusyError, DeadlineError, RingTuneError, UsageError

DEADLINE_S: Final = 30.0
MAX_WAITING: Final = 4
"""Half of them of one address."""
MAX_CHANGES: Final = 16
COMMAND: Final = (sys.executable, "-P", "-m", "coordinator.web.predictor")
_MIN_FACTOR, _MAX_FACTOR = 0.01, 100.0
_MAX_ANSWERS: Final = 64
_MAX_BYTES: Final = 1 << 20
_KEYS: Final = ("speeds", "rates", "microbatches")


def check_question(value: object) -> dict[str, Any]:
    """Check a browser's question: factors of speeds and rates, and a number of micro-batches; raises ``UsageError``."""
    if not isinstance(value, Mapping) or set(value) - set(_KEYS):
        raise UsageError(f"a what-if is an object with {', '.join(_KEYS)}")
    checked: dict[str, Any] = {"microbatches": value.get("microbatches", 0)}
    if type(checked["microbatches"]) is not int or not 0 <= checked["microbatches"] <= 1 << 16:
        raise UsageError("microbatches has to be a whole number, 0 = as they are")
    for name in ("speeds", "rates"):
        factors = value.get(name, {})
        if not isinstance(factors, Mapping) or len(factors) > MAX_CHANGES:
            raise UsageError(f"{name} has to be an object of at most {MAX_CHANGES} factors")
        for key, factor in factors.items():
            is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
            if not is_number or not _MIN_FACTOR <= factor <= _MAX_FACTOR or len(key) > 200:
                raise UsageError(f"{name}: a factor has to be from {_MIN_FACTOR} to {_MAX_FACTOR:g}")
        checked[name] = {key: round(float(factor), 4) for key, factor in factors.items() if factor != 1}
    return checked


def measured_s(state: PageState, steps: int) -> float | None:
    """Seconds of the first ``steps`` steps; None if they are not done, or the run resumed at a later step.

    Between the points of a thinned curve the seconds are interpolated.
    """
    points = state.curves["seconds"].points()
    if not points or points[0].step != 1 or points[-1].step < steps:
        return None
    before = max((point for point in points if point.step <= steps), key=lambda point: point.step)
    after = min((point for point in points if point.step >= steps), key=lambda point: point.step)
    if after.step == before.step:
        return before.value
    return before.value + (after.value - before.value) * (steps - before.step) / (after.step - before.step)


class SimulatorProcess:
    """The simulator in a process of its own."""

    def __init__(self, state: PageState, *, deadline_s: float = DEADLINE_S, command: Sequence[str] = COMMAND) -> None:
        self._state, self._deadline_s, self._command = state, deadline_s, command
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = Counter[str]()
        self._answers: dict[str, dict[str, Any]] = {}

    async def ask(self, value: object, address: str) -> dict[str, Any]:
        """Answer a question of the browser at ``address``; see ``predictor.answer``, with ``measured_s`` added.

        Raises:
            UsageError: the question is invalid, or no run can be predicted yet.
            BusyError: ``MAX_WAITING`` questions wait already, or half as many of this address.
            DeadlineError: there is no answer within the time limit.
        """
        question = {**check_question(value), **self._of_run()}
        line = json.dumps(question, sort_keys=True)
        key = hashlib.sha256(line.encode()).hexdigest()
        if key not in self._answers:
            if self._waiting.total() >= MAX_WAITING or self._waiting[address] >= MAX_WAITING // 2:
                raise BusyError("the simulator is asked too often now; ask again in a moment")
            self._waiting[address] += 1
            try:
                async with self._turn:
                    if key not in self._answers:
                        self._answers[key] = await self._answer(line)
                        if len(self._answers) > _MAX_ANSWERS:
                            del self._answers[next(iter(self._answers))]
            finally:
                self._waiting[address] -= 1
                self._waiting += Counter()  # drops addresses without questions
        answer = self._answers[key]
        if "error" in answer:
            return answer
        return {**answer, "measured_s": measured_s(self._state, int(answer.get("steps", 0)))}

    async def close(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _of_run(self) -> dict[str, Any]:
        state = self._state
        if state.plan is None or state.profile is None or state.job is None:
            raise UsageError("there is no plan with measured times yet; ask again when the run trains")
        local = state.plan.course.local_iterations
        done = state.curves["seconds"].last
        return {
            "plan": json.dumps(state.plan.to_json()),
            "profile": json.dumps(state.profile.to_json()),
            "settings": MemorySettings.of_job(state.job)._asdict(),
            "steps": done.step // local * local if done and not state.is_over else done.step if done else 0,
        }

    async def _answer(self, line: str) -> dict[str, Any]:
        try:
            return await asyncio.wait_for(self._exchange(line), self._deadline_s)
        except TimeoutError:
            await self.close()
            raise DeadlineError(
                f"the simulator has not answered in {self._deadline_s:g} s; 'ringtune what-if' has no such limit"
            ) from None
        except asyncio.CancelledError:  # whoever asks next must not get this answer
            await self.close()
            raise

    async def _exchange(self, line: str) -> dict[str, Any]:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_MAX_BYTES,
                start_new_session=True,  # Ctrl-C is for the command, which then ends this process
            )
        if process.stdin is None or process.stdout is None:
            raise RingTuneError("the simulator has no pipes; please report this")
        with contextlib.suppress(ConnectionError):  # of a process that has ended: it says nothing then
            process.stdin.write(line.encode() + b"\n")
            await process.stdin.drain()
        text = await process.stdout.readline()
        if not text:
            await self.close()
            raise RingTuneError("the simulator has ended; the log of this command says why")
        answer: dict[str, Any] = json.loads(text)
        return answer

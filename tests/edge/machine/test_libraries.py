"""The one thread that computes, and what libraries keep."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edge.machine.libraries import ComputeThread
from ringtune.costs.memory_sizes import KEPT_KERNELS, KERNEL_BYTES
from ringtune.errors import InterruptedRunError

WAIT_S = 60.0


def test_compute_thread_refuses_what_comes_after_its_end() -> None:
    """A call that comes while the agent ends is refused at once, so the process does not wait for its deadline."""
    thread = ComputeThread()
    assert thread.call(lambda: 7, timeout_s=WAIT_S, what="seven") == 7
    assert thread.close(WAIT_S)
    with pytest.raises(InterruptedRunError, match="the agent ends"):
        thread.call(lambda: 7, timeout_s=0.5, what="seven")


def test_compute_thread_refuses_what_was_queued_behind_its_end() -> None:
    """The same holds for what was asked just before, while the last work was still under way."""
    thread = ComputeThread()
    started, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        assert go_on.wait(WAIT_S)

    thread.submit(hold)
    assert started.wait(WAIT_S)
    assert not thread.close(0.0)
    late = thread.submit(lambda: 7)
    go_on.set()
    with pytest.raises(InterruptedRunError):
        late.result(WAIT_S)


_SHAPES = """
from edge.machine.libraries import limit_libraries
limit_libraries(1)
import torch
torch.set_num_threads(1)
def own_bytes():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) << 10
def multiply(lengths):
    for length in lengths:
        torch.mm(torch.zeros(length, 256, dtype=torch.bfloat16), torch.zeros(256, 256, dtype=torch.bfloat16))
multiply(range(1, 5))
before = own_bytes()
multiply(range(8, 88))
print(own_bytes() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read on Linux only")
def test_batches_of_unlike_lengths_compile_no_more_than_the_plan_counts() -> None:
    """Products in bfloat16 of 80 lengths: each length has a kernel of its own, and 80 of them take 50 MiB."""
    done = subprocess.run([sys.executable, "-c", _SHAPES], check=True, capture_output=True, timeout=120)  # noqa: S603
    assert int(done.stdout) <= 1.2 * KEPT_KERNELS * KERNEL_BYTES

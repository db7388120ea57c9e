"""What every test gets: one compute thread, no network, and a check that nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ringtune.machine import process
from tests.support import leaks

# Read by the libraries when they are imported, so they have to be set before; child processes inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Agents that are started without --state keep nothing in the home of whoever runs the tests.
_STATE = tempfile.TemporaryDirectory(prefix="ringtune-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name
os.environ.pop("RINGTUNE_COORDINATOR", None)

# Who runs the tests in the background or under nohup ignores signals, and child processes would inherit that.
for _number, _handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)

GRACE_S = 20.0

# Several processes load what they test with as a node does: without the compiler and others, for a third of the time.
if "PYTEST_XDIST_WORKER" in os.environ:
    from edge.machine.libraries import load_libraries

    load_libraries()


class _WithoutOracle(MetaPathFinder):
    """Skips what AdapterHub's library is needed for, which runs with transformers 4 alone."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Skip the test, or the module of tests, that imports the library."""
        if name.partition(".")[0] == "adapters":
            pytest.skip("AdapterHub's library does not run with this transformers", allow_module_level=True)


if not version("transformers").startswith("4."):
    sys.meta_path.insert(0, _WithoutOracle())

# The same examples in every run, and no limit per example: a busy machine is no failure (pytest has its timeout).
settings.register_profile(
    "ringtune", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ringtune")


# What is loaded while tests are collected stays for ever. Later tests leave enough alone that is made and dropped.
gc.disable()
gc.set_threshold(10_000, 10, 10)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let one ask for all tests."""
    parser.addoption("--all", action="store_true", help="every case of every test, and those that take long")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make no thorough case that nobody asks for: laws alone have thousands, and each process collects all tests."""
    config = metafunc.config
    if not config.getoption("--all") and not any("[" in argument for argument in config.args):
        from tests.support.sample import leave_thorough_out

        for mark in metafunc.definition.iter_markers("parametrize"):
            leave_thorough_out(*mark.args[1:2])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw the sample; in one of several processes, take the files in the order in which they are given out."""
    if not config.getoption("--all"):
        from tests.support.sample import in_sample

        kept = in_sample(items)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]
    if hasattr(config, "workerinput"):
        from tests.support.sample import order

        places = order(item.nodeid.split("::")[0] for item in items)
        items.sort(key=lambda item: places[item.nodeid.split("::")[0]])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give out whole files, in our order."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.support.sample import ByFile

    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """Collect garbage from now on; what there is by now is not looked at once more, a second for each process."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def garbage_of_this_file_only() -> None:
    """Spare the garbage collector what was there before: libraries, caches of plans; half a million objects.

    It would look at all of them again and again, for up to two thirds of the time of a test that makes many objects.
    """
    gc.collect()
    gc.freeze()


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a child process or a non-daemon thread behind.

    What fixtures of a wider scope started before the test does not count. Left-over processes are killed,
    so that one fault does not spoil the tests after it.
    """
    threads_before, processes_before = _threads(), leaks.processes_below()
    yield
    alive = leaks.still_running(leaks.processes_below() - processes_before, GRACE_S)
    names = [leaks.kill(child) for child in alive]
    threads = _threads() - threads_before
    for thread in threads:
        thread.join(timeout=GRACE_S)
    left = sorted(thread.name for thread in threads if thread.is_alive())
    if alive or left:
        pytest.fail(f"left behind {len(alive)} processes {names} and {len(left)} threads {left}", pytrace=False)


@pytest.fixture(autouse=True)
def one_compute_thread() -> Iterator[None]:
    """Give torch one thread again after a test whose code took as many as there are cores.

    With two, each small operation waits for the other thread, and on busy cores all later tests take ten times as long.
    """
    yield
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def process_of_tests_is_not_ended() -> Iterator[None]:
    """Fail a test that makes this process one that may be ended: a later test would end it, and all that run in it."""
    yield
    if process._is_own:
        process._is_own = False
        pytest.fail("grace.mark_command_process() was called in the process of the tests", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def template_ends() -> Iterator[None]:
    """End the template that clusters have shared, if there is one."""
    yield
    cluster = sys.modules.get("tests.support.cluster")
    if cluster is not None:
        cluster.TEMPLATE.close()

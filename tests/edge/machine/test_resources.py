"""What a process may use of its machine, and what it does with freed memory."""

from __future__ import annotations

import ctypes
import json
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from edge.machine import resources
from edge.machine.resources import cpu_model, describe_hardware, memory_budget
from ringtune.job.job import Job, Model
from ringtune.machine.resources import LIBRARY_BYTES
from tests.support.fake_system import FakeSystem, fake_system
from tests.support.plans import make_plan
from tests.support.tiny import write_model


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        ("processor\t: 0\nmodel name\t: Made-up 3000\n", "Made-up 3000"),
        ("processor\t: 0\nCPU part\t: 0xd08\n\nModel\t\t: Raspberry Pi 4 Model B\n", "Raspberry Pi 4 Model B"),
    ],
)
def test_cpu_model_is_what_the_kernel_calls_it(tmp_path: Path, cpuinfo: str, model: str) -> None:
    """On x86 a name for each core, on ARM one for the board."""
    proc, _ = fake_system(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert cpu_model(proc=proc) == model


def test_hardware_text_changes_with_everything_that_changes_timings(tmp_path: Path) -> None:
    """Another processor, quota, number of threads or accelerator: another text."""
    plain = fake_system(tmp_path / "a", {"proc/cpuinfo": "model name: A\n"})
    limited = fake_system(tmp_path / "b", {"proc/cpuinfo": "model name: A\n", "cgroup/cpu.max": "50000 100000\n"})
    other = fake_system(tmp_path / "c", {"proc/cpuinfo": "model name: B\n"})
    texts = [describe_hardware(threads=1, proc=proc, cgroup=cgroup) for proc, cgroup in (plain, limited, other)]
    texts.append(describe_hardware(threads=2, proc=plain[0], cgroup=plain[1]))
    texts.append(describe_hardware(threads=1, accelerator="GPU", proc=plain[0], cgroup=plain[1]))
    assert len(set(texts)) == 5
    assert texts[0].startswith("A, ") and texts[0].endswith("no quota, 1 thread")
    assert "quota 0.5 cores per 100 ms" in texts[1]


MIB = 1 << 20
KIB_OF_MIB = 1024


def board(root: Path, *, resident: int, of_files: int, limit: int, used: int, page_cache: int = 0) -> FakeSystem:
    """Fake a board with a memory limit, and an agent on it that has so much resident; sizes are in MiB."""
    status = f"VmRSS: {resident * KIB_OF_MIB} kB\nRssFile: {of_files * KIB_OF_MIB} kB\n"
    return fake_system(
        root,
        {
            "proc/meminfo": f"MemAvailable: {8000 * KIB_OF_MIB} kB\n",
            "proc/self/status": status,
            "proc/self/cgroup": "0::/\n",
            "cgroup/memory.max": f"{limit * MIB}\n",
            "cgroup/memory.current": f"{used * MIB}\n",
            "cgroup/memory.stat": f"active_file {page_cache * MIB}\n",
        },
    )


def budget(system: FakeSystem) -> int:
    """Ask for the budget there."""
    return memory_budget(proc=system.proc, cgroup=system.cgroup)


def test_budget_is_the_limit_less_the_libraries_whether_they_are_loaded_or_not(tmp_path: Path) -> None:
    """An agent that joins has 60 MiB, one that has loaded its libraries has all of it, files' pages included."""
    libraries = LIBRARY_BYTES // MIB
    joins = board(tmp_path / "joins", resident=60, of_files=20, limit=1000, used=60, page_cache=20)
    loaded = board(
        tmp_path / "loaded", resident=libraries, of_files=114, limit=1000, used=libraries + 300, page_cache=414
    )
    assert budget(joins) == budget(loaded) == 1000 * MIB - LIBRARY_BYTES


def test_budget_has_no_room_that_is_used_already(tmp_path: Path) -> None:
    """What other processes hold of the group is gone, and what this one holds above its libraries too.

    A full group gives a small number, so that the planner can say what does not fit.
    """
    system = board(tmp_path / "used", resident=500, of_files=100, limit=1000, used=600, page_cache=100)
    assert budget(system) == (1000 - 100 - 500) * MIB
    assert budget(board(tmp_path / "full", resident=100, of_files=0, limit=100, used=100)) == MIB


_SCRIPT = """
import ctypes, json, os, pathlib, resource, threading
from edge.machine.resources import keep_freed_memory, return_freed_memory
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
library.free.argtypes = (ctypes.c_void_p,)
library.prctl(41, 1, 0, 0, 0)  # no huge pages, of which a block of 4 MiB would need three: PR_SET_THP_DISABLE
library.posix_memalign.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t)

def faults():
    def touch():
        for _ in range(20):
            block = [bytearray(4 << 20) for _ in range(3)]
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return -touch() + touch()

def heaps():
    found, wait = set(), threading.Barrier(6)
    def take():
        wait.wait()
        found.add(library.malloc(1 << 16) >> 26)  # the heap of a thread begins at a multiple of 64 MiB
        wait.wait()
    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return len(found)

def tensor(times=1):
    address = ctypes.c_void_p()
    assert not library.posix_memalign(address, 64, times * 3 << 20)
    ctypes.memset(address, 1, times * 3 << 20)
    return address

def resident():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) >> 10

def pieces():
    before = resident()
    for _ in range(2):
        tensors = [tensor() for _ in range(40)]
        small = [library.malloc(size) for size in range(24, 1024, 8) for _ in range(40)]
        peak = resident() - before
        for each in tensors: library.free(each)
    return peak

def left():
    parted = [(tensor(4), library.malloc(100 << 10)) for _ in range(10)]
    for block, _ in parted: library.free(block)
    assert return_freed_memory()
    before = resident()
    for each in [tensor() for _ in range(40)]: library.free(each)
    return resident() - before

def answer(measure, mode):
    ours, theirs = os.pipe()
    if os.fork() == 0:
        assert mode == "leave" or keep_freed_memory()
        assert mode != "return" or return_freed_memory()
        os.write(theirs, str(measure()).encode())
        os._exit(0)
    os.wait()
    os.close(theirs)
    return int(os.read(ours, 99))

print(json.dumps([answer(*each) for each in (
    (faults, "keep"), (faults, "leave"), (heaps, "keep"), (heaps, "leave"), (pieces, "return"), (pieces, "keep"),
    (left, "keep"),
)]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_allocator_keeps_blocks_in_one_heap_or_gives_pieces_back() -> None:
    """Each measured in a process of its own, with a setting and without.

    Blocks of 4 MiB that come and go cost almost no page faults. What one of six threads frees every other one can use.
    Where small things took the slivers beside 120 MiB of tensors, the next 120 MiB do not fit into a kept heap. What is
    freed after the change of the setting does not stay in the holes of that heap.
    """
    done = subprocess.run([sys.executable, "-c", _SCRIPT], check=True, capture_output=True, timeout=120)  # noqa: S603
    faults, plain_faults, heaps, plain_heaps, returned_mib, kept_mib, left_mib = json.loads(done.stdout)
    assert faults < 1000 < plain_faults
    assert heaps <= 2 < plain_heaps
    assert returned_mib < 140 < 200 < kept_mib
    assert left_mib < 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_holes_of_the_heap_are_not_looked_for_in_a_preloaded_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks do not begin as glibc's, so it would be asked for GiB after GiB until no address is left."""
    plain, preloaded = ctypes.CDLL, SimpleNamespace(mallopt=ctypes.CDLL(None).mallopt)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: plain(name) if name else preloaded)
    assert resources.return_freed_memory()
    assert resources.keep_freed_memory() and not resources._holes


PLAN = make_plan([("a", 0, 2)], ["a"], num_blocks=2)


@pytest.mark.parametrize("has", ["all", "some", "none"])
def test_heap_keeps_freed_memory_only_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: str) -> None:
    """A budget near what the plan needs leaves nothing for a heap in pieces.

    A node that fetched the blocks that it hosts has no whole model: its files say what weights take. One that only
    helps has the configuration alone.
    """
    path, job, chosen = (
        write_model(tmp_path) / "model.safetensors",
        Job(model=Model(path=str(tmp_path))).with_overrides({"train.max_length": 64}),
        list[str](),
    )
    if has == "some":
        save_file({name: value for name, value in load_file(path).items() if ".layer.0." not in name}, path)
    elif has == "none":
        path.unlink()
    model, besides_bytes = resources.facts_here(tmp_path, job)
    assert has != "some" or besides_bytes >= path.stat().st_size
    monkeypatch.setattr(resources, "keep_freed_memory", lambda: chosen.append("keep"))
    monkeypatch.setattr(resources, "return_freed_memory", lambda: chosen.append("return"))
    sizes = {"data_bytes": 0, "besides_bytes": besides_bytes}
    resources.set_up_heap(PLAN, "a", job, model, memory_bytes=1 << 30, **sizes)
    assert chosen[-1] == "keep"
    if has != "none":
        resources.set_up_heap(PLAN, "a", job, model, memory_bytes=1 << 10, **sizes)
        assert chosen[-1] == "return"

"""The numeric libraries of an agent: loaded while it is idle, with limited threads, used on one thread.

Loaded unprepared, the first run of an agent is slow and its slice seems large: ``transformers`` imports every optional
package that it finds, and torch's compiler and distributed tensors (seconds and a hundred megabytes that no slice
uses), and the code of torch's kernels is read from the disk page by page at their first use.

All torch work of an agent runs on one thread: thread pools and allocator arenas exist once, and work is done in the
order of the queue.

Two modules of torch are loaded only by a node that compiles: the compiler and its symbolic shapes. Libraries load them
only to mark functions that must not be compiled, and to compare two shapes. They pull in a third of all modules of a
node, sympy among them, 80 MB, and a third of the CPU time of the imports. A stand-in provides the names in
``DEFERRED``; any other name loads the module itself:

====================================== ========================================== ====================================
module                                 used by                                    for
====================================== ========================================== ====================================
torch._dynamo                          optimizers, transformers.modeling_utils    ``disable``, ``allow_in_graph``: marks
torch._dynamo                          each step of an optimizer                  ``graph_break``: there is no graph
torch.fx.experimental.symbolic_shapes  ``torch.autograd.backward`` with gradients ``sym_eq``, ``expect_true``
====================================== ========================================== ====================================

Source: torch 2.13, ``_compile.py``, ``optim/optimizer.py``, ``autograd/__init__.py``; transformers 4.57.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import operator
import os
import queue
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from typing import Any, Final, TypeVar

from ringtune.costs.memory_sizes import KEPT_KERNELS
from ringtune.errors import InterruptedRunError, UsageError
from ringtune.hints import hint_to_install
from ringtune.machine.process import carry_out, result_within
from ringtune.quantities import format_seconds


def _unmarked(function: Any = None, *_: Any, **__: Any) -> Any:
    """Return a function unchanged; without one, a decorator that does so."""
    return _unmarked if function is None else function


DEFERRED: Final[Mapping[str, Mapping[str, Any]]] = {
    "torch._dynamo": {"disable": _unmarked, "allow_in_graph": _unmarked, "graph_break": lambda *_: None},
    "torch.fx.experimental.symbolic_shapes": {"sym_eq": operator.eq, "expect_true": bool},
}
"""Module -> names of its stand-in."""

_AT_ONCE: Final = ("torch._dynamo._trace_wrapped_higher_order_op",)
"""Modules of a deferred package that are loaded without it; ``transformers.masking_utils`` imports from one."""


def defer_compiler() -> None:
    """Install a stand-in for each module of ``DEFERRED`` that is not loaded yet.

    If a part of torch needs more than the stand-ins provide, they are removed, and all is loaded as usual.
    """
    for name in DEFERRED:
        if name not in sys.modules and (spec := find_spec(name)):
            sys.modules[name] = StandIn(spec)
    if not any(isinstance(finder, _WholePackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WholePackages())
    try:
        for name in _AT_ONCE:
            importlib.import_module(name)
    except ImportError:
        for name in DEFERRED:
            if isinstance(sys.modules.get(name), StandIn):
                del sys.modules[name]


class StandIn(types.ModuleType):
    """Takes the place of a module until a name is requested that it does not have; then the module is loaded."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__ = spec
        if spec.submodule_search_locations is not None:
            self.__path__ = list(spec.submodule_search_locations)
        vars(self).update(DEFERRED[spec.name])

    def __getattr__(self, name: str) -> Any:
        """Load the module and return its attribute; names with ``__`` are missing, as some tools ask every module."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_load(self.__name__), name)


def _load(name: str) -> types.ModuleType:
    if isinstance(sys.modules.get(name), StandIn):
        del sys.modules[name]
    return importlib.import_module(name)


class _WholePackages(MetaPathFinder, Loader):
    """Loads a deferred package before one of its modules is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in _AT_ONCE:
            return None
        package = name.rpartition(".")[0]
        while package and package not in DEFERRED:
            package = package.rpartition(".")[0]
        if not isinstance(sys.modules.get(package), StandIn):
            return None
        _load(package)
        return spec_from_loader(name, self) if name in sys.modules else find_spec(name)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return sys.modules[spec.name]  # loaded with its package

    def exec_module(self, module: types.ModuleType) -> None:
        pass


NEEDED: Final = (
    "safetensors.torch",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.processing_utils",
)
"""Modules that a run of any family imports."""

NEEDLESS: Final = ("accelerate", "flax", "librosa", "scipy", "sklearn", "soundfile", "tf", "torchvision")
"""Packages that ``transformers`` imports if installed, although embedding, blocks and head do not need them."""

_CHECKS: Final = ("transformers.utils.import_utils", "transformers.utils")
"""Modules that have ``is_NAME_available``; transformers 5 knows neither flax nor tf."""
_SIZE = 64


def require_libraries() -> None:
    """Refuse to start without the extra ``node``; raises ``UsageError``."""
    modules = [module for module in ("torch", "transformers") if module not in sys.modules]
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise UsageError(f"a node needs {', '.join(missing)}, not installed here: {hint_to_install('node')}")


def load_libraries() -> None:
    """Import the modules of a run, which takes half of the time of its preparation."""
    defer_compiler()
    with _no_process_groups():
        _hide_needless()
        for module in NEEDED:
            importlib.import_module(module)


@contextlib.contextmanager
def _no_process_groups() -> Iterator[None]:
    """Make ``transformers`` believe that torch has no process groups, or it would load torch's distributed tensors.

    Source: transformers 4.57, ``model_debugging_utils.py``, ``modeling_utils.py``.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    is_available = distributed.is_available
    distributed.is_available = lambda: False
    try:
        yield
    finally:
        distributed.is_available = is_available


def _hide_needless() -> None:
    """Make ``transformers`` believe that the packages ``NEEDLESS`` are not installed, before a module checks."""
    for home in _CHECKS:
        checks = importlib.import_module(home)
        for name in NEEDLESS:
            if hasattr(checks, f"is_{name}_available"):
                setattr(checks, f"is_{name}_available", _not_installed)


def _not_installed(*_: Any, **__: Any) -> bool:
    return False


def touch_kernels() -> None:
    """Run each kind of work of a block once on small zeros, so that the kernels' code is in memory.

    Its pages belong to the library's file: all processes share them, and the system drops them if memory is short.
    """
    import torch
    from torch.nn import functional

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        # 1. initial values of adapters
        weight = torch.nn.init.kaiming_uniform_(torch.empty(_SIZE, _SIZE))
        torch.nn.init.normal_(weight, std=0.02)
        weight.requires_grad_(True)
        # 2. a block: attention, feed-forward, adapter, norm
        rows = torch.zeros(4, _SIZE, _SIZE)
        mask = (torch.ones(4, _SIZE, dtype=torch.int64).sum(dim=1) > 0).to(rows.dtype).view(4, 1, 1, 1)
        heads = functional.linear(rows, weight, weight[0]).view(4, _SIZE, 4, _SIZE // 4).transpose(1, 2)
        heads = heads.repeat(1, 1, 1, 1) * 1.0
        seen = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask.expand(4, 4, _SIZE, _SIZE))
        inner = functional.gelu(functional.linear(seen.transpose(1, 2).reshape(rows.shape), weight))
        adapted = functional.silu(functional.relu(inner)) + torch.tanh(inner)
        normed = functional.layer_norm(adapted + rows, (_SIZE,))
        # 3. backward
        torch.autograd.backward([normed], [rows])


T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_CLOSE = object()


def limit_libraries(threads: int) -> None:
    """Set threads and caches of numeric libraries that are not loaded yet; settings of the user take precedence.

    Waiting workers sleep instead of spinning, which would take cores from other processes.

    By default oneDNN keeps 1,024 compiled kernels, and torch's own cache as many again: batches of unlike lengths with
    products in bfloat16 grow a process by hundreds of MiB. A block needs some ten for a number of tokens, and all
    blocks the same ones. Measured on a core with AVX512-BF16, six blocks of width 384 and 40 numbers of tokens (240
    shapes) in turn: with 16 kernels 6 instead of 158 MiB in the same time, without any 25 % more time. torch's cache
    holds one, as 0 ends the process.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KEPT_KERNELS))
    os.environ.setdefault("LRU_CACHE_CAPACITY", "1")


def drained(entries: queue.SimpleQueue[T]) -> Iterator[T]:
    """Take what is in a queue, without waiting for more."""
    with contextlib.suppress(queue.Empty):
        while True:
            yield entries.get_nowait()


class ComputeThread:
    """One daemon thread that runs queued functions in order."""

    def __init__(self, name: str = "compute") -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queue ``function``; the future has its result or error, ``InterruptedRunError`` after ``close``."""
        future: Future[T] = Future()
        self._queue.put((function, future))
        if self._ended.is_set():
            self._refuse()
        return future

    def call(self, function: Callable[[], T], *, timeout_s: float, what: str) -> T:
        """Run ``function`` on the thread and return its result; raises ``DeadlineError``."""
        late = f"waited {format_seconds(timeout_s)} for {what}; give more time or a smaller model"
        return result_within(self.submit(function), timeout_s, late)

    def close(self, timeout_s: float) -> bool:
        """End the thread after the queued functions; False if it is still busy after ``timeout_s`` seconds."""
        self._queue.put(_CLOSE)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (entry := self._queue.get()) is not _CLOSE:
            carry_out(*entry)
            del entry  # an idle thread must not keep the last run's objects alive
        self._ended.set()
        self._refuse()

    def _refuse(self) -> None:
        """Fail the futures of functions that were queued after the end."""
        for entry in drained(self._queue):
            if entry is not _CLOSE and entry[1].set_running_or_notify_cancel():
                entry[1].set_exception(InterruptedRunError("the agent ends; start it again"))

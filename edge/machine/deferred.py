"""Stand-ins for two modules of torch that a node loads only if it compiles: the compiler and its symbolic shapes.

Libraries load them only to mark functions that must not be compiled, and to compare two shapes. They pull in a third of
all modules of a node, sympy among them, 80 MB, and a third of the CPU time of the imports. A stand-in provides the
names in ``DEFERRED``; any other name loads the module itself:

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

import importlib
import operator
import sys
import types
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from typing import Any, Final


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

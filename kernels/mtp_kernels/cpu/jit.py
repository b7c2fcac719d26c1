"""Compilation of the CPU kernels by numba: without the GIL, once for a machine.

numba has no public way to what this file takes from its inner classes, each a good part of the
time that a machine compiles for, which is a third of what plain njit takes:
- parts are neither optimized nor assembled by themselves, but in the function that calls them all
  (the code libraries, and the compiler that makes them);
- a part is compiled for the types of its arguments, not for each constant (get_call_template);
- loops are made of the widest vectors that the CPU has (an attribute of LLVM's functions);
- what was compiled is kept by the content of its sources (`_cache`, see cache.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numba
from numba import njit, types
from numba.core import event
from numba.core.codegen import CPUCodeLibrary, JITCodeLibrary
from numba.core.compiler import Compiler

from mtp_kernels.cpu.cache import KernelCache

logger = logging.getLogger(__name__)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile on first call, for the types of that call."""
    dispatcher = _compiled(function, no_cfunc_wrapper=True, pipeline_class=_WholeCompiler)
    dispatcher._cache = KernelCache(function)
    return dispatcher


def inner(function: Callable[..., Any]) -> Any:
    """Compile a function that compiled ones alone call, as a part of those."""

    def refuse(*arguments: Any, **named: Any) -> NoReturn:
        raise TypeError(
            f"{function.__qualname__} is compiled as a part of other functions alone: expected a "
            "call from one that numba compiles, found one from Python"
        )

    dispatcher = _compiled(function, no_cfunc_wrapper=True, no_cpython_wrapper=True)
    dispatcher._compile_for_args = refuse
    dispatcher._insert = lambda *overload: None  # no call from Python finds one
    return dispatcher


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    with _set(numba.config, "DISABLE_JIT", False):  # kernels have no other form
        dispatcher = njit(function, nogil=True, error_model="numpy", **options)
    dispatcher.get_call_template = _by_types(dispatcher.get_call_template)
    return dispatcher


def _by_types(template: Callable[..., Any]) -> Callable[..., Any]:
    """Have callers that pass a constant call what is compiled for its type.

    numba would compile the function anew for each constant.
    """

    def of_types(args: Iterable[Any], kws: Mapping[str, Any]) -> Any:
        named = {name: types.unliteral(kind) for name, kind in kws.items()}
        return template(tuple(map(types.unliteral, args)), named)

    return of_types


class _Wide(JITCodeLibrary):
    """Code whose loops LLVM makes of the widest vectors that the CPU has.

    Where these have 512 bits it prefers 256 by itself, with which conversions take up to a third
    more time.
    """

    def finalize(self) -> None:
        """Link all that this calls, each once."""
        _link_called(self, self._final_module)
        self._linking_libraries = []
        super().finalize()

    def add_ir_module(self, ir_module: Any) -> None:
        for function in ir_module.functions:
            if not function.is_declaration:  # llvmlite's own add knows no attributes with values
                set.add(function.attributes, '"prefer-vector-width"="512"')
        super().add_ir_module(ir_module)


class _Part(_Wide):
    """Code that is linked into other functions', and never run by itself.

    numba would optimize and assemble it by itself, and link and optimize it again in every function
    on the way to the one that is called from Python: most of the time of compiling.
    """

    @property
    def codegen(self) -> _NoEnvironments:
        return _NoEnvironments()

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    def finalize(self) -> None:
        """Leave it to the function that this is linked into."""
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        """Return the code with all that it calls, for a function of numba's plain njit."""
        module = super()._get_module_for_linking().clone()
        _link_called(self, module)
        return module

    @classmethod
    def _unserialize(cls, codegen: Any, state: Any) -> Any:
        """Return code that was kept, which is whole."""
        with _set(codegen, "_library_class", _Wide):
            return _Wide._unserialize(codegen, state)


@contextmanager
def _set(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set an attribute meanwhile."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _link_called(library: JITCodeLibrary, module: Any) -> None:
    """Link all that a library calls into a module, each library behind all that call it: LLVM links
    only what is called so far."""
    called: dict[JITCodeLibrary, None] = {}

    def visit(caller: JITCodeLibrary) -> None:
        for other in caller._linking_libraries:
            if other not in called:
                if isinstance(other, _Part):
                    visit(other)
                called[other] = None

    visit(library)
    for other in reversed(called):
        library._reload_init.update(other._reload_init)
        module.link_in(CPUCodeLibrary._get_module_for_linking(other), preserve=True)


class _NoEnvironments:
    """Takes the environment of a function, which only code that calls Python reads."""

    def set_env(self, name: str, environment: object) -> None:
        """Drop it: the code has no address yet."""


class _WholeCompiler(Compiler):
    """Compiler of a function together with its parts."""

    def compile_extra(self, function: Any) -> Any:
        codegen = self.state.targetctx.codegen()
        self.state.library = _Wide(codegen, function.__qualname__)
        self.state.library.enable_object_caching()
        with _set(codegen, "_library_class", _Part):  # of all that is compiled meanwhile
            return super().compile_extra(function)


class _Announcer(event.Listener):
    """Logs the name of each kernel that is being compiled."""

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        if function.__module__.startswith(__package__.partition(".")[0]):
            logger.info("compiling %s", function.__name__)

    def on_end(self, event: Any) -> None:
        """Nothing is logged at the end."""


event.register("numba:compile", _Announcer())

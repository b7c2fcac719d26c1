"""Compilation of the CPU kernels by numba: without the GIL, once for a machine.

What was compiled is kept in the user's cache folder by the content of its sources: another version
of the package, in another place, compiles only what changed.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

import numba
from numba import njit, types
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.typed_passes import InlineOverloads, NopythonRewrites
from numba.core.untyped_passes import InlineClosureLikes

logger = logging.getLogger(__name__)

# Passes over closures, expressions of whole arrays, and overloads to inline.
_NEEDLESS = {InlineClosureLikes, InlineOverloads, NopythonRewrites}
_NEW_OBJECTS = 100_000  # between collections
_FOLDERS_KEPT = 32  # of each module, the last used: of other versions, of checkouts beside this one


def compiled(function: Callable[..., Any]) -> Any:
    """Compile on first call, for the types of that call.

    Without a folder to write to nothing is kept.
    """
    dispatcher = _compiled(function, no_cfunc_wrapper=True, pipeline_class=_WholeCompiler)
    with suppress(_NoPlaceError):
        dispatcher._cache = _Cache(function)
    return dispatcher


def inner(function: Callable[..., Any]) -> Any:
    """Compile a function that compiled ones alone call, as a part of those."""
    return _compiled(
        function, no_cfunc_wrapper=True, no_cpython_wrapper=True, pipeline_class=_PlainCompiler
    )


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
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
        self._linking_libraries = _callers_first(self)
        super().finalize()

    def add_ir_module(self, ir_module: Any) -> None:
        for function in ir_module.functions:
            if not function.is_declaration:  # llvmlite's own add knows no attributes with values
                set.add(function.attributes, '"prefer-vector-width"="512"')
        super().add_ir_module(ir_module)

    def _optimize_functions(self, module: Any) -> None:
        """Leave it to the passes over the whole module."""


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

    @classmethod
    def _unserialize(cls, codegen: Any, state: Any) -> Any:
        """Return code that was kept, which is whole."""
        with _libraries(codegen, _Wide):
            return _Wide._unserialize(codegen, state)


@contextmanager
def _libraries(codegen: Any, kind: type[JITCodeLibrary]) -> Iterator[None]:
    """Make libraries of a kind of the functions that are compiled meanwhile, numba's own too."""
    before, codegen._library_class = codegen._library_class, kind
    try:
        yield
    finally:
        codegen._library_class = before


def _callers_first(library: JITCodeLibrary) -> list[JITCodeLibrary]:
    """Return the libraries that a library needs, each behind all that call it: LLVM links only what
    is called so far."""
    found: dict[JITCodeLibrary, None] = {}

    def visit(caller: JITCodeLibrary) -> None:
        for called in caller._linking_libraries:
            if called not in found:
                if isinstance(called, _Part):
                    visit(called)
                found[called] = None

    visit(library)
    return list(reversed(found))


class _NoEnvironments:
    """Takes the environment of a function, which only code that calls Python reads."""

    def set_env(self, name: str, environment: object) -> None:
        """Drop it: the code has no address yet."""


class _PlainCompiler(Compiler):
    """Compiler without the passes over what kernels have none of."""

    def define_pipelines(self) -> Any:
        pipelines = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes = [step for step in pipeline.passes if step[0] not in _NEEDLESS]
        return pipelines


class _WholeCompiler(_PlainCompiler):
    def compile_extra(self, function: Any) -> Any:
        codegen = self.state.targetctx.codegen()
        self.state.library = _Wide(codegen, function.__qualname__)
        self.state.library.enable_object_caching()
        with _few_collections(), _libraries(codegen, _Part):
            return super().compile_extra(function)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collect garbage rarely: with the usual thresholds that was a fourth of the time of compiling,
    which makes millions of objects. Only one thread compiles at a time."""
    before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Announcer(event.Listener):
    """Logs the name of each kernel that is being compiled."""

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        if function.__module__.startswith(__package__.partition(".")[0]):
            logger.info("compiling %s", function.__name__)

    def on_end(self, event: Any) -> None:
        """Nothing is logged at the end."""


event.register("numba:compile", _Announcer())


def _sources(path: str, projects: str) -> set[str]:
    """Return the file of a module, and those of the modules of its project that it imports, and so
    on: compiled functions call each other across files, and packages import themselves."""
    found, left = {path}, [path]
    while left:
        new = _imported(left.pop(), projects) - found
        found |= new
        left += new
    return found


@cache
def _imported(path: str, projects: str) -> frozenset[str]:
    """Return the files of the modules of a project that a file imports."""
    imports = re.compile(rf"^from ((?:{projects})[.\w]*) import (\([^)]*\)|.*)", re.M)
    modules = (
        sys.modules.get(module)
        for parent, names in imports.findall(Path(path).read_text())
        for module in (parent, *(f"{parent}.{name}" for name in re.findall(r"\w+", names)))
    )
    files = (getattr(module, "__file__", None) for module in modules)
    return frozenset(file for file in files if file is not None)


@cache
def _version(module: str, path: str) -> str:
    """Return a digest of numba's version and the content of a module's sources, wherever they
    are."""
    digest = hashlib.sha256(numba.__version__.encode())
    for content in sorted(map(_content_digest, _sources(path, _projects(module)))):
        digest.update(content)
    return digest.hexdigest()[:24]


@cache
def _content_digest(path: str) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()


def _home() -> Path:
    """Return the folder of all that is kept; raises _NoPlaceError for a user without a home."""
    if own := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(own)
    caches = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(caches or Path.home() / ".cache", "mtp-export")
    except RuntimeError as error:  # as Path.home() says it
        raise _NoPlaceError from error


def _projects(module: str) -> str:
    return "|".join(sorted({name.partition(".")[0] for name in (module, __name__)}))


class _NoPlaceError(Exception):
    """There is no folder to keep compiled code in."""


class _Place(_CacheLocator):
    """Place of a function's cache, whose name stands for its sources."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def from_function(cls, function: Any, path: str) -> Self:
        try:
            module = function.__module__
            own = cls(_home() / "kernels" / f"{module}-{_version(module, path)}")
            own.ensure_cache_path()
        except OSError as error:
            raise _NoPlaceError from error
        return own

    def ensure_cache_path(self) -> None:
        if not self._folder.is_dir():
            _make_room(self._folder)
            super().ensure_cache_path()
        with suppress(OSError):  # a folder that others keep for this user
            os.utime(self._folder)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._folder.name

    def get_disambiguator(self) -> str:
        return "kept"


class _Implementation(CompileResultCacheImpl):
    _locator_classes: list[Any] = [_Place]


class _Cache(FunctionCache):
    _impl_class = _Implementation


def _make_room(folder: Path) -> None:
    """Remove the folders, but the last used, that other sources of a module were compiled to."""
    module = folder.name.rpartition("-")[0]
    others = sorted(folder.parent.glob(f"{module}-*"), key=lambda path: path.stat().st_mtime)
    for path in others[: -(_FOLDERS_KEPT - 1)]:
        shutil.rmtree(path, ignore_errors=True)

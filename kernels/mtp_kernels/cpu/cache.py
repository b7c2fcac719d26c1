"""Compiled functions in the user's cache folder, kept by the content of their sources: another
version of the package, in another place, compiles only what changed.

The cache never matters: what cannot be read is compiled, what cannot be written is compiled by the
next process too, and a damaged file is written anew.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import pickle
import re
import shutil
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from mtp_kernels.cpu.matrix_units import HAS_TILES

logger = logging.getLogger(__name__)

_FOLDERS_KEPT = 32  # of each module, the last used: of other versions, of checkouts beside this one
# numba's settings that code depends on.
_SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT")
_DIGEST_BYTES = hashlib.sha256().digest_size


class KernelCache(NullCache):
    """Kept forms of one function, as its dispatcher asks for them; a file for the types of a call.

    A file holds the digest of its content, then the content: the types, and what numba needs to
    have the function again.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._folder = _folder_of(function)

    def load_overload(self, types: Any, context: Any) -> Any:
        """Return the function as compiled for some types, None where that is not kept."""
        context.refresh()
        try:
            path = self._path(types, context)
            content = path.read_bytes()
            digest, kept = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if digest != hashlib.sha256(kept).digest():
                raise ValueError(f"damaged: {str(path)!r}")
            kept_types, parts = pickle.loads(kept)
            if kept_types != types:
                return None
            result = CompileResult._rebuild(context, *parts)
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is wrong with a file, it is written anew
            _say_once("A kept kernel cannot be read, and is compiled anew", error)
            return None
        with suppress(OSError):  # a folder that others keep for this user
            os.utime(path.parent)
        return result

    def save_overload(self, types: Any, result: Any) -> None:
        """Keep the function as compiled for some types."""
        if result.library.has_dynamic_globals:  # addresses of this process
            return
        kept = dumps((types, result._reduce()))
        try:
            path = self._path(types, result.target_context)
            _write(path, hashlib.sha256(kept).digest() + kept)
        except OSError as error:
            _say_once("Compiled kernels cannot be kept: every start compiles them", error)

    def _path(self, types: Any, context: Any) -> Path:
        if self._folder is None:
            raise FileNotFoundError("no cache folder: set XDG_CACHE_HOME")
        function = self._function
        settings = [str(getattr(numba.config, name)) for name in _SETTINGS]
        variant = str(types), context.codegen().magic_tuple(), settings, HAS_TILES
        digest = hashlib.sha256(f"{sys.implementation.cache_tag} {variant}".encode())
        digest.update(function.__code__.co_code)
        digest.update(dumps(tuple(cell.cell_contents for cell in function.__closure__ or ())))
        return self._folder / f"{function.__qualname__}-{digest.hexdigest()[:24]}.kernel"


def _write(path: Path, content: bytes) -> None:
    """Write a file that is whole or not there, whoever else writes it."""
    if not path.parent.is_dir():
        _make_room(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _make_room(folder: Path) -> None:
    """Remove the folders, but the last used, that other sources of a module were compiled to."""
    module = folder.name.rpartition("-")[0]
    others = sorted(folder.parent.glob(f"{module}-*"), key=_last_use)
    for path in others[: -(_FOLDERS_KEPT - 1)]:
        shutil.rmtree(path, ignore_errors=True)


def _last_use(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


def _say_once(problem: str, error: Exception) -> None:
    """Log the first problem of this process."""
    if not _said():
        _said().append(problem)
        logger.warning("%s: %s", problem, error)


@cache
def _said() -> list[str]:
    """Return the problems that this process has logged."""
    return []


def _folder_of(function: Callable[..., Any]) -> Path | None:
    """Return the folder of a function's module, None without sources or without a home."""
    try:
        module, path = function.__module__, inspect.getfile(function)
        return cache_home() / "kernels" / f"{module}-{_version(module, path)}"
    except (OSError, RuntimeError):
        return None


def cache_home() -> Path:
    """Return the folder of all that is kept; raises as Path.home() does."""
    if folder := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mtp-export")


@cache
def _version(module: str, path: str) -> str:
    """Return a digest of numba's version and the content of a module's sources, wherever they
    are."""
    projects = "|".join(sorted({name.partition(".")[0] for name in (module, __name__)}))
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for content in sorted(map(_content_digest, _sources(path, projects))):
        digest.update(content)
    return digest.hexdigest()[:24]


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
def _content_digest(path: str) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()

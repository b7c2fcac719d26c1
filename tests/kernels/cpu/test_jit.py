"""Compiled functions are kept by the content of their sources, and announced when they compile."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from numba import njit
from numba.core.registry import CPUDispatcher

import mtp_kernels
from mtp_kernels.cpu.cache import KernelCache
from mtp_kernels.cpu.jit import compiled, logger

PACKAGE = "from kept_kernels import __name__"  # as packages do that import their own modules
PART = """
from mtp_kernels.cpu.jit import inner

@inner
def more(x):
    return x + 1
"""
KERNEL = """
from kept_kernels.part import more
from mtp_kernels.cpu.jit import compiled

@compiled
def twice_more(x):
    return 2 * more(x)
"""


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def twice_more(folder: Path, monkeypatch: pytest.MonkeyPatch, part: str = PART) -> Any:
    """Import the kernel from a package written to a folder, as a new process would."""
    package = folder / "kept_kernels"
    package.mkdir(parents=True, exist_ok=True)
    for name, text in (("__init__", PACKAGE), ("part", part), ("kernel", KERNEL)):
        path = package / f"{name}.py"
        path.write_text(text)
        module = "kept_kernels" + ("" if name == "__init__" else f".{name}")
        places = [str(package)] if name == "__init__" else None
        spec = importlib.util.spec_from_file_location(
            module, path, submodule_search_locations=places
        )
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module, made)
        spec.loader.exec_module(made)
    return made.twice_more


def test_another_copy_of_the_same_sources_compiles_nothing(
    tmp_path: Path,
    cache_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger.name)
    first = twice_more(tmp_path / "one", monkeypatch)
    assert first(3) == 8
    assert [record.args for record in caplog.records] == []  # not of this project's kernels
    assert sum(first.stats.cache_misses.values()) == 1
    kept = sorted(cache_home.rglob("*.kernel"))
    assert len(kept) == 1 and kept[0].is_relative_to(cache_home / "mtp-export")
    copy = twice_more(tmp_path / "two", monkeypatch)
    assert copy is not first and copy(3) == 8
    assert sum(copy.stats.cache_hits.values()) == 1 and not copy.stats.cache_misses


def test_a_change_in_a_part_compiles_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert twice_more(tmp_path / "one", monkeypatch)(3) == 8
    changed = twice_more(tmp_path / "two", monkeypatch, PART.replace("+ 1", "+ 2"))
    assert changed(3) == 10 and not changed.stats.cache_hits
    back = twice_more(tmp_path / "three", monkeypatch)
    assert back(3) == 8 and not back.stats.cache_misses


def test_a_kept_kernel_serves_a_new_one_and_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice_more(tmp_path / "one", monkeypatch)(3)
    kept = twice_more(tmp_path / "two", monkeypatch)

    def one_more(x: Any) -> Any:
        return kept(x) + 1

    assert compiled(one_more)(3) == 9
    assert kept(4) == 10 and not kept.stats.cache_misses


def test_what_is_in_use_is_kept_whatever_was_compiled_since(
    tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkouts that are worked on beside a program leave it its kernels."""
    twice_more(tmp_path / "one", monkeypatch)(3)
    (used,) = (cache_home / "mtp-export/kernels").iterdir()
    module = used.name.rpartition("-")[0]
    others = [used.with_name(f"{module}-{number}") for number in range(100)]
    for second, folder in enumerate([used, *others], 1):
        folder.mkdir(exist_ok=True)
        os.utime(folder, (second, second))
    assert twice_more(tmp_path / "two", monkeypatch)(3) == 8
    twice_more(tmp_path / "three", monkeypatch, PART.replace("+ 1", "+ 2"))(3)
    left = {folder for folder in used.parent.iterdir() if folder in others}
    assert used.is_dir() and 8 <= len(left) < 100
    assert left == set(others[-len(left) :])


def test_constants_compile_nothing_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is compiled for the types of its arguments, whatever constants its callers pass."""
    several = KERNEL.replace("2 * more(x)", "more(1) + more(2) + more(x)")
    monkeypatch.setitem(globals(), "KERNEL", several)
    assert twice_more(tmp_path / "one", monkeypatch)(3) == 9
    part = sys.modules["kept_kernels.part"]
    assert len(part.more.signatures) == 1


def test_every_kernel_of_the_package_is_kept() -> None:
    """A kernel without a place to be kept in is compiled again by every process."""
    names = [module.name for module in pkgutil.walk_packages(mtp_kernels.__path__, "mtp_kernels.")]
    modules = [import_module(name) for name in names if "triton" not in name]
    kernels = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, CPUDispatcher) and value.__module__ == module.__name__
    ]
    called = [one for one in kernels if not one.targetoptions.get("no_cpython_wrapper")]
    assert len(called) > 20
    kept = [one for one in called if isinstance(one._cache, KernelCache)]
    assert kept == called and all(one._cache._folder for one in kept)


def test_a_part_serves_what_numba_compiles_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of plain njit is linked with a part, and with all that the part calls."""
    text = PART.replace("return x + 1", "return np.full((1, 1), x + 1).reshape(1).copy()[0]")
    twice_more(tmp_path / "one", monkeypatch, text.replace("@inner", "import numpy as np\n@inner"))
    assert sys.modules["kept_kernels.kernel"].twice_more(3) == 8
    part = sys.modules["kept_kernels.part"].more

    @njit
    def thrice_more(x: int) -> Any:
        return 3 * part(x)

    assert thrice_more(3) == 12


def test_a_part_called_from_python_says_why_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert twice_more(tmp_path / "one", monkeypatch)(3) == 8
    with pytest.raises(TypeError, match="more is compiled as a part of other functions alone"):
        sys.modules["kept_kernels.part"].more(3)

"""The cache of compiled functions never matters, whatever happens to its files and folders."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_kernels.cpu import cache
from mtp_kernels.cpu.jit import compiled

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "zeroed": lambda content: bytes(len(content)),
    "a zeroed page": lambda content: content[:512] + bytes(512) + content[1024:],
    "a flipped bit": lambda content: content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
    "an older file": lambda content: b"0.68.1 pickled" * 100,
}


def kernel() -> Any:
    """A function compiled as by a new process."""

    def total(x: Any) -> Any:
        return x.sum() + 1

    return compiled(total)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Messages of the cache."""
    cache._said.cache_clear()
    caplog.set_level("WARNING", cache.logger.name)
    yield caplog.messages
    cache._said.cache_clear()


def run() -> Any:
    """The function, run once."""
    made = kernel()
    assert made(np.ones(3)) == 4.0
    return made


def only_file(home: Path) -> Path:
    (path,) = (path for path in home.rglob("*") if path.is_file())
    return path


def hits(made: Any) -> int:
    return sum(made.stats.cache_hits.values())


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_said_once_and_written_anew(
    home: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert hits(run()) == 0
    path = only_file(home)
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    assert hits(run()) == 0
    (message,) = caplog.messages
    assert "compiled anew" in message and str(path) in message and "\n" not in message
    assert only_file(home) == path and path.read_bytes() != DAMAGES[damage](whole)
    assert hits(run()) == 1


def test_other_types_under_the_same_name_are_not_taken(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = cache.KernelCache._path
    monkeypatch.setattr(cache.KernelCache, "_path", lambda self, types, *on: real(self, (), *on))
    run()
    made = kernel()
    assert made(np.ones(3, np.float32)) == 4.0 and hits(made) == 0
    assert not caplog.messages


def test_a_file_that_cannot_be_opened_is_written_anew(home: Path) -> None:
    run()
    path = only_file(home)
    path.unlink()
    path.symlink_to(path)  # open fails, for root too
    assert hits(run()) == 0 and hits(run()) == 1 and not path.is_symlink()


def test_a_folder_that_vanished_is_made_again(home: Path) -> None:
    made = kernel()
    shutil.rmtree(home, ignore_errors=True)
    made(np.ones(3))
    shutil.rmtree(home)
    assert made(np.ones(3, np.float32)) == 4.0
    assert hits(run()) == 0 and hits(run()) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("function", ["mkdir", "write_bytes", "replace"])
def test_what_cannot_be_written_is_said_once(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    function: str,
    number: int,
) -> None:
    def fails(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as broken:
        broken.setattr(Path, function, fails)
        assert hits(run()) == 0 and hits(run()) == 0
    (message,) = caplog.messages
    assert "every start compiles them" in message and os.strerror(number) in message
    assert not [path for path in home.rglob("*") if path.is_file()]
    assert hits(run()) == 0 and hits(run()) == 1


def test_a_full_disk(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    home.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(home)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("mounting takes root")
    try:
        assert hits(run()) == 0
        (message,) = caplog.messages
        assert "No space left on device" in message
        assert not [path for path in home.rglob("*") if path.is_file()]
    finally:
        subprocess.run(["umount", str(home)], check=True)


def test_a_cache_folder_that_is_a_file(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    home.write_text("")
    run()
    assert len(caplog.messages) == 1


def test_a_user_without_a_home(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "~")  # as pathlib finds it where nobody has set it
    run()
    assert caplog.messages == [
        "Compiled kernels cannot be kept: every start compiles them: no cache folder: set "
        "XDG_CACHE_HOME"
    ]


def test_writers_at_the_same_time_leave_whole_files(home: Path) -> None:
    path, contents = home / "module-1" / "f.kernel", [bytes([n]) * 100_000 for n in range(8)]
    threads = [threading.Thread(target=cache._write, args=(path, one)) for one in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert only_file(home).read_bytes() in contents


@pytest.mark.parametrize("setting", ["NUMBA_DISABLE_JIT=1", "NUMBA_OPT=0"])
def test_settings_of_numba(home: Path, setting: str) -> None:
    """Kernels are compiled whatever is set, and those of one setting do not serve another."""
    code = (
        "import numpy as np\n"
        "from mtp_kernels.cpu.jit import compiled\n"
        "from mtp_kernels.cpu.vectors import address, block_sum\n"
        "@compiled\n"
        "def total(x):\n"
        "    return block_sum(address(x))\n"
        "assert total(np.ones(64, np.float32)) == 64.0\n"
        "print(sum(total.stats.cache_hits.values()))\n"
    )
    program = home.parent / "program.py"
    program.write_text(code)
    name, value = setting.split("=")
    outputs = [
        subprocess.run(
            [sys.executable, str(program)],
            env=os.environ | settings,
            check=True,
            capture_output=True,
            text=True,
        )
        for settings in ({}, {name: value})
    ]
    assert [output.stderr for output in outputs] == ["", ""]
    assert [output.stdout.strip() for output in outputs] == ["0", "01"[name != "NUMBA_OPT"]]

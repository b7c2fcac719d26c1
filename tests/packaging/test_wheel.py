"""The wheel built from the tree: what is in it, and that it does the demo where it alone is
installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "mtp_export": ROOT / "mtp_export",
    "mtp_runtime": ROOT / "runtime/mtp_runtime",
    "mtp_checkpoints": ROOT / "checkpoints/mtp_checkpoints",
    "mtp_kernels": ROOT / "kernels/mtp_kernels",
}
MINUTES = 60


def pip(python: Path, *arguments: object) -> None:
    """Run an environment's pip, in a folder that is no source tree."""
    command = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(list(map(str, command)), check=True, cwd=python.parent)


def pinned(package: str) -> str:
    """The version that the constraints file has."""
    (line,) = re.findall(rf"^{package}==.*$", (ROOT / "constraints.txt").read_text(), re.M)
    return str(line)


@pytest.fixture(scope="module")
def fresh_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an empty environment."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin/python"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, fresh_python: Path) -> Path:
    """The wheel of the files that git knows: nothing that lies beside them gets in."""
    tree = tmp_path_factory.mktemp("tree")
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, files.split("\0")):
        if (
            name.startswith(("mtp_export/", "runtime/", "checkpoints/", "kernels/"))
            or "/" not in name
        ):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    folder = tmp_path_factory.mktemp("wheel")
    pip(fresh_python, "wheel", "--no-deps", "--wheel-dir", folder, tree)
    (path,) = folder.glob("mtp_export-*.whl")
    return path


@pytest.mark.nightly
@pytest.mark.timeout(10 * MINUTES)
def test_the_wheel_holds_the_three_packages_with_their_types(wheel: Path) -> None:
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.suffix in (".py", ".html", ".txt") or path.name == "py.typed"
    }
    assert {f"{package}/py.typed" for package in PACKAGES} <= expected
    assert "mtp_export/serve/page.html" in expected
    assert files == expected


@pytest.mark.nightly
@pytest.mark.timeout(30 * MINUTES)
def test_the_wheel_alone_does_the_demo(wheel: Path, fresh_python: Path, tmp_path: Path) -> None:
    pip(fresh_python, "install", pinned("torch"))  # a CPU build at hand is then kept
    pip(fresh_python, "install", "-c", ROOT / "constraints.txt", wheel)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    where = subprocess.run(
        [fresh_python, "-c", "import mtp_kernels; print(mtp_kernels.__file__)"],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert Path(where.strip()).is_relative_to(fresh_python.parents[1])
    environment |= {"BIN": str(fresh_python.parent), "OUT": str(tmp_path / "demo")}
    done = subprocess.run(
        [ROOT / "scripts/demo"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "demo/verify.html").is_file()

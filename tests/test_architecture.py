"""The imports between packages, and the house limits, read from the source with ast."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE_ROOTS = [ROOT / "mtp_export", ROOT / "runtime/mtp_runtime", ROOT / "kernels/mtp_kernels"]
SOURCES = sorted(path for root in PACKAGE_ROOTS for path in root.rglob("*.py"))

CORE = {"checkpoint", "families", "targets", "schemes", "errors"}
# Who may import which other unit. A unit is a module or subpackage of mtp_export, or a package.
ARROWS = {
    "cli": CORE
    | {"bundle", "commands", "export", "inspection"}
    | {"options", "progress", "split", "tables"},
    "commands": CORE
    | {"bundle", "options", "precision_tables", "progress", "prompts", "quantize"}
    | {"split", "tables", "verify", "mtp_runtime"},
    "options": CORE | {"split"},
    "tables": CORE | {"bundle", "inspection", "launch", "progress"},
    "launch": CORE | {"bundle", "split"},
    "precision_tables": CORE | {"bundle", "progress", "tables"},
    "split": CORE,
    "bundle": CORE | {"progress", "split"},
    "export": CORE | {"bundle", "split"},
    "quantize": CORE | {"bundle", "split"},
    "inspection": CORE,
    "verify": CORE | {"progress", "prompts", "mtp_runtime", "mtp_kernels"},
    "checkpoint": {"errors", "families", "progress"},
    "families": {"errors"},
    "targets": {"errors", "families", "checkpoint"},
    "schemes": {"errors", "families", "checkpoint", "targets", "mtp_kernels"},
    "progress": {"errors"},
    "prompts": {"errors"},
    "errors": set(),
    "mtp_runtime": {"mtp_kernels", "checkpoint", "families", "targets", "schemes", "errors"},
    "mtp_kernels": set(),
}
# Only this unit of mtp_kernels is open to mtp_export's schemes.
SCHEMES_MAY_USE = "mtp_kernels.quantize"


def unit_of(module: str) -> str | None:
    """The unit a dotted module name belongs to, None for other people's packages."""
    first, _, rest = module.partition(".")
    if first in ("mtp_runtime", "mtp_kernels"):
        return first
    if first == "mtp_export":
        return None if rest.startswith("__") else rest.split(".")[0] or None
    return None


def module_name(path: Path) -> str:
    for root in PACKAGE_ROOTS:
        if path.is_relative_to(root):
            parts = path.relative_to(root.parent).with_suffix("").parts
            return ".".join(part for part in parts if part != "__init__")
    raise AssertionError(path)


def imported_modules(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the arrows"
            base = node.module or ""
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    unit = unit_of(module_name(path))
    if unit is None:  # mtp_export/__init__.py itself
        assert not [name for name in imported_modules(path) if unit_of(name)]
        return
    for name in imported_modules(path):
        other = unit_of(name)
        if other is None or other == unit:
            continue
        assert other in ARROWS[unit], f"{unit} must not import {name}"
        if unit == "schemes" and other == "mtp_kernels":
            assert name.startswith(SCHEMES_MAY_USE), f"schemes must not import {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 400, f"{path} has {len(text.splitlines())} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 50, f"{path}: {node.name} has {length} lines"


def test_only_the_command_line_prints() -> None:
    for path in SOURCES:
        if path.name == "cli.py" or path.parent.name == "commands":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{path}:{node.lineno} prints"

"""Floors of the packages, read from the source with ast, and the style of docstrings.

Imports go down, never up or in a circle. Type-only and lazy imports count like any other.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE_ROOTS = [
    ROOT / "mtp_export",
    ROOT / "runtime/mtp_runtime",
    ROOT / "checkpoints/mtp_checkpoints",
    ROOT / "kernels/mtp_kernels",
]
SOURCES = sorted(path for root in PACKAGE_ROOTS for path in root.rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))

# Rooms from the lowest floor to the highest; those of one line do not import each other. A room is
# a module or a package, and everything below it that is no room of its own.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("mtp_kernels.sizes",),
    (
        "mtp_kernels",
        "mtp_kernels.batch_layout",
        "mtp_kernels.cpu",
        "mtp_kernels.gpu",
        "mtp_kernels.tensor_checks",
    ),
    ("mtp_kernels.quantize", "mtp_kernels.verify_attention", "mtp_kernels.gated_delta"),
    (
        "mtp_kernels.decoder",
        "mtp_kernels.state_space",
        "mtp_kernels.weight_statistics",
        "mtp_kernels.stored_linear",
    ),
    ("mtp_checkpoints",),
    (
        "mtp_checkpoints.errors",
        "mtp_checkpoints.dtypes",
        "mtp_checkpoints.named_tuples",
        "mtp_checkpoints.quiet",
        "mtp_checkpoints.suggestions",
    ),
    ("mtp_checkpoints.families", "mtp_checkpoints.sources"),
    ("mtp_checkpoints.containers",),
    ("mtp_checkpoints.tensors",),
    ("mtp_checkpoints.formats",),
    ("mtp_checkpoints.quantization",),
    ("mtp_checkpoints.layouts", "mtp_checkpoints.weights"),
    (
        "mtp_runtime.config",
        "mtp_runtime.prompts",
        "mtp_runtime.stop_texts",
        "mtp_runtime.tokenizer",
        "mtp_runtime.parallel",
    ),
    ("mtp_runtime.chat", "mtp_runtime.chat_worker"),
    ("mtp_runtime.cache", "mtp_runtime.sampling", "mtp_runtime.logprobs"),
    ("mtp_runtime.acceptance", "mtp_runtime.layers", "mtp_runtime.prefix_cache"),
    ("mtp_runtime.loading", "mtp_runtime.prefix_states"),
    ("mtp_runtime.models", "mtp_runtime.allocators"),
    (
        "mtp_runtime.teacher_forcing",
        "mtp_runtime.request",
        "mtp_runtime.memory",
        "mtp_runtime.static_graph",
    ),
    ("mtp_runtime.streaming", "mtp_runtime.summary", "mtp_runtime.drafters"),
    (
        "mtp_runtime.draft_length",
        "mtp_runtime.judging",
        "mtp_runtime.layer_inputs",
        "mtp_runtime.training",
    ),
    ("mtp_runtime.engine", "mtp_runtime.run_plan"),
    ("mtp_runtime.llm",),
    ("mtp_runtime",),
    ("mtp_export",),
    (
        "mtp_export.busy_machine",
        "mtp_export.inspection",
        "mtp_export.options",
        "mtp_export.paragraphs",
        "mtp_export.paths",
        "mtp_export.plan",
        "mtp_export.progress",
    ),
    ("mtp_export.kept_states",),
    ("mtp_export.state_files",),
    ("mtp_export.schemes",),
    ("mtp_export.bundle",),
    ("mtp_export.verify.check",),
    ("mtp_export.verify.options",),
    ("mtp_export.verify.gates", "mtp_export.verify.evidence"),
    ("mtp_export.verify.context", "mtp_export.verify.diagnosis"),
    (
        "mtp_export.verify.files",
        "mtp_export.verify.weights",
        "mtp_export.verify.decoding",
        "mtp_export.verify.report",
    ),
    ("mtp_export.verify",),
    ("mtp_export.cluster",),
    ("mtp_export.publish", "mtp_export.serve", "mtp_export.tune"),
    ("mtp_export.calibrate",),
    ("mtp_export.commands",),
    ("mtp_export.cli",),
    ("mtp_export.__main__",),
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def module_of(path: Path) -> str:
    """The dotted name of a source file."""
    root = next(root for root in PACKAGE_ROOTS if path.is_relative_to(root))
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_of(path): path for path in SOURCES}


def room_of(module: str) -> str:
    """The room that a module lies in."""
    while module not in FLOOR_OF:
        module = module.rpartition(".")[0]
        assert module, "every module lies in a room"
    return module


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """The nodes of a source file."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@cache
def imports_of(module: str) -> frozenset[str]:
    """The modules of this project that a module imports, wherever in it."""
    path, names = MODULES[module], set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the arrows"
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                names.add(inside if inside in MODULES else node.module or "")
    return frozenset(name for name in names if name in MODULES and name != module)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    room = room_of(module)
    for other in sorted(imports_of(module)):
        below = room_of(other)
        # __version__ is the one thing that mtp_export itself holds.
        assert below == room or FLOOR_OF[below] < FLOOR_OF[room], (
            f"{module} must not import {other}"
        )


def test_no_imports_go_in_a_circle() -> None:
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"a circle: {' -> '.join((*trail, module))}"
        if module not in done:
            for other in sorted(imports_of(module)):
                visit(other, (*trail, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_benchmarks_share_code_by_common_alone() -> None:
    """Shapes, checkpoints of them, and benchmarks/common lie below the benchmarks, which import no
    other benchmark."""
    floors = ("released", "make_checkpoint", "common")
    paths = {path: path.relative_to(ROOT / "benchmarks") for path in BENCHMARKS}
    for path, place in paths.items():
        room = place.parts[0].removesuffix(".py")
        floor = floors.index(room) if room in floors else len(floors)
        for other in sorted(benchmark_rooms_of(path) - {room}):
            assert other in floors[:floor] or other == "make_bundle", f"{place} imports {other}"


def benchmark_rooms_of(path: Path) -> set[str]:
    """The modules and folders of benchmarks/ that a source file imports."""
    modules = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module == "benchmarks":
            modules |= {f"benchmarks.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    return {name.split(".")[1] for name in modules if name.startswith("benchmarks.")}


def test_pages_name_files_that_are_there() -> None:
    """Every path from the top in the pages that say where things are; `<name>` is any."""
    tops = "mtp_export|runtime|checkpoints|kernels|tests|fixtures|benchmarks|docs|scripts"
    for page in ("docs/architecture.md", "CONTRIBUTING.md"):
        for name in re.findall(rf"`((?:{tops})/[^`\s:]*)", (ROOT / page).read_text()):
            pattern = re.sub("<[^>]*>", "*", name).rstrip("/")
            assert any(ROOT.glob(pattern)), f"{page} names {name}, which is not there"


def test_every_room_is_there() -> None:
    assert set(FLOOR_OF) <= set(MODULES)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < 400, f"{path} has {len(lines)} lines"
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
            assert length <= 50, f"{path}: {node.name} has {length} lines"


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function's docstring, which do not count as the function's."""
    first = node.body[0]
    if ast.get_docstring(node) is None:
        return 0
    return (first.end_lineno or first.lineno) - first.lineno + 1


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    # Most files have no string that opens so, and parsing them takes seconds.
    opening = re.compile(r"""["'](?:\s|\\n|\\\n)*(?:What|Whether|How)\b""")
    paths = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}: {docstring.splitlines()[0]}"
        for path in paths
        if opening.search(path.read_text())
        for node in nodes_of(path)
        if isinstance(node, kinds)
        and (docstring := ast.get_docstring(node))
        and docstring.split()[0] in {"What", "Whether", "How"}
    ]
    assert not found, "\n".join(found)


def test_only_the_command_line_prints() -> None:
    for path in SOURCES:
        if path.name == "cli.py" or path.parent.name == "commands":
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{path}:{node.lineno} prints"


def test_no_option_is_read_by_a_string() -> None:
    """Commands get dataclasses; a name in quotes would be checked by nobody."""
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                read = ast.unparse(node.value)
                assert not read.endswith("context.params"), f"{path}:{node.lineno} reads {read}"
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("typer."):
                assert "._" not in str(node.module), f"{path}:{node.lineno}: Typer's own"

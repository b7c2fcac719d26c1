"""Help beside the options: the page of the program, and the examples under each command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from rich.box import ROUNDED
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table

from mtp_export.commands.names import COMMANDS
from mtp_export.commands.output import plain_console

# Of each command two examples, and the page of the documentation that explains it.
EXAMPLES: dict[str, tuple[str, str, str]] = {
    "export": (
        "mtp-export export DeepSeek-V3 V3",
        "mtp-export export --input-dir hf://org/name --output-dir V3 --target sglang",
        "docs/cli.md",
    ),
    "quantize": (
        "mtp-export quantize --list",
        "mtp-export quantize --input-dir V3 --base-quant bf16 --mtp-quant bf16",
        "docs/cli.md",
    ),
    "graft": (
        "mtp-export graft V3-AWQ DeepSeek-V3 --dry-run",
        "mtp-export graft V3-AWQ hf://org/name --output-dir OUT",
        "docs/graft.md",
    ),
    "tune": (
        "mtp-export tune --bundle V3 --data prompts.jsonl --output-dir OUT --dry-run",
        "mtp-export tune --bundle V3 --data prompts.jsonl --output-dir OUT --k 3",
        "docs/tune.md",
    ),
    "finish": (
        "mtp-export finish V3",
        "mtp-export finish V3 --report finished.json",
        "docs/distributed.md",
    ),
    "verify": (
        "mtp-export verify V3 --level files",
        "mtp-export verify V3-int4 --source DeepSeek-V3 --level weights",
        "docs/verify.md",
    ),
    "generate": (
        'mtp-export generate V3 --prompt "def read("',
        "mtp-export generate V3 --prompts prompts.jsonl --chat --json",
        "docs/cli.md",
    ),
    "serve": (
        "mtp-export serve V3",
        "mtp-export serve V3 --port 9000 --config serve.yaml",
        "docs/serve.md",
    ),
    "compile": (
        "mtp-export compile V3 --output step.pt2",
        'mtp-export generate V3 --compiled-step step.pt2 --prompt "def read("',
        "docs/gpu.md",
    ),
    "launch": (
        "mtp-export launch V3 --k 3",
        "mtp-export launch V3 --engine vllm --nodes 2 --tp 16 --head 10.0.0.1",
        "docs/engines.md",
    ),
    "inspect": (
        "mtp-export inspect DeepSeek-V3",
        "mtp-export inspect hf://org/name --json",
        "docs/cli.md",
    ),
    "env": ("mtp-export env", "mtp-export env --json", "docs/cli.md"),
    "push": (
        "mtp-export push V3 org/name --report report.json --dry-run",
        "mtp-export push V3 org/name --report report.json",
        "docs/hub.md",
    ),
}
# Lines of a command's help under its examples.
NOTES: dict[str, str] = {
    "serve": "The command line goes first, then MTP_EXPORT_<OPTION>, then --config, then defaults.",
    "verify": "Exit codes: 0 nothing failed, 7 a check failed, 3 a bundle that cannot be read,"
    " 2 wrong options.",
}
SETTINGS = (
    "An option that is not on the command line is taken from MTP_EXPORT_<OPTION>"
    " (MTP_EXPORT_OUTPUT_DIR for --output-dir), else its default holds."
)
_FIRST_STEPS = ("export", "quantize", "verify", "generate", "serve")
_OPTIONS = {
    "-h, --help": "Show this page; COMMAND --help shows a command's options.",
    "-V, --version": "Show the version; with --json as JSON.",
    "--debug": "Show the traceback of an error.",
    "--install-completion": "Install completion for the current shell.",
    "--show-completion": "Show completion for the current shell.",
}


def epilog_of(command: str) -> str | None:
    """Return what follows the options in a command's help."""
    if command not in EXAMPLES:
        return None
    *examples, page = EXAMPLES[command]
    lines = ["Examples:", *(f"  {line}" for line in examples)]
    notes = [NOTES[command]] if command in NOTES else []
    return "\n\n".join(["\n".join(lines), *notes, SETTINGS, *documentation(page)])


def documentation(page: str) -> list[str]:
    """Return the line that says where a page of the documentation is; none where there is no
    checkout that has it: packages do not."""
    return [f"Documentation: {root / page}" for root in _checkouts() if (root / page).is_file()][:1]


def _checkouts() -> Iterator[Path]:
    """Yield the folders where a checkout may be: that of the packages, and the one that they were
    installed from, by pip's record of it (PEP 610)."""
    yield Path(__file__).resolve().parents[2]
    if (installed := _installed_from()) is not None:
        yield installed


@cache
def _installed_from() -> Path | None:
    """Return the folder that pip installed the program from; None for one from elsewhere."""
    from importlib.metadata import PackageNotFoundError, distribution  # takes time
    from urllib.parse import unquote, urlsplit

    try:
        recorded = distribution("mtp-export").read_text("direct_url.json")
        url = urlsplit(json.loads(recorded or "{}").get("url", ""))
    except (PackageNotFoundError, ValueError):
        return None
    return Path(unquote(url.path)) if url.scheme == "file" else None


def print_help() -> None:
    """Print the page of the program."""
    console = plain_console()
    console.print("Usage: mtp-export COMMAND [OPTIONS]", highlight=False)
    console.print()
    console.print(
        "Export, quantize and verify DeepSeek-V3-class checkpoints with their MTP module.",
        highlight=False,
    )
    console.print(_panel("Commands", COMMANDS))
    console.print("Examples:", highlight=False)
    for command in _FIRST_STEPS:
        console.print(f"  {EXAMPLES[command][0]}", highlight=False, soft_wrap=True)
    console.print(_panel("Options", _OPTIONS))
    console.print(
        "mtp-export --input-dir SRC --output-dir OUT exports without the command's name.",
        SETTINGS,
        *documentation("docs/index.md"),
        highlight=False,
        sep="\n",
    )


def _panel(title: str, rows: Mapping[str, str]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold cyan")
    table.add_column()
    for name, words in rows.items():
        table.add_row(name, words)
    return Panel(table, title=title, title_align="left", border_style="dim", box=ROUNDED)

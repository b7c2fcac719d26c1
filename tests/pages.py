"""Markdown pages of the project as tests read them: code blocks, links, sections and tables."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, *DOCS, ROOT / "CONTRIBUTING.md"]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """Fenced code block; language is empty for output and drawings."""

    page: str
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Lines that a shell would run, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        words = (shlex.split(line, comments=True) for line in lines)
        return [shlex.join(line) for line in words if line]


@cache
def blocks_of(page: Path) -> tuple[Block, ...]:
    """Return the code blocks of a page, in order."""
    name = str(page.relative_to(ROOT))
    return tuple(Block(name, *match.groups()) for match in _FENCE.finditer(page.read_text()))


def python_of(page: Path, word: str) -> str:
    """Return the one Python block of a page that has a word in it."""
    (text,) = (b.text for b in blocks_of(page) if b.language == "python" and word in b.text)
    return text


def prose_of(page: Path) -> str:
    """Return a page without its code blocks."""
    return _FENCE.sub("", page.read_text())


def sections_of(page: Path) -> dict[str, str]:
    """Return the text below each heading of a page, up to the next heading of any level."""
    _, *parts = re.split(r"^#+ (.+)$", prose_of(page), flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of all table rows in a text, heads and rules left out."""
    rows, lines = [], text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        is_rule = re.fullmatch(r"\|[-:| ]+\|", line)
        is_head = re.fullmatch(r"\|[-:| ]+\|", following)
        if line.startswith("|") and not is_rule and not is_head:
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            rows.append([cell.strip().replace("\\|", "|") for cell in cells])
    return rows


def code_in(text: str) -> list[str]:
    """Return the code spans of a text."""
    return re.findall(r"`([^`\n]+)`", text)


def paths_in(text: str) -> list[str]:
    """Return the code spans of a text that are paths of this repository, patterns left out."""
    roots = "|".join(path.name for path in ROOT.iterdir() if not path.name.startswith("."))
    return [
        code
        for code in code_in(text)
        if re.fullmatch(rf"(?:{roots})(?:/[\w./-]*)?", code) and not code.startswith("build")
    ]


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

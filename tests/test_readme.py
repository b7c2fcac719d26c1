"""Commands that the README and docs/ show run and print what is shown; what they name exists."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cases import Outcome, run_program
from hub_server import HubServer
from mtp_checkpoints import errors
from mtp_checkpoints.layouts import target_names
from mtp_export.commands.registry import program
from mtp_export.commands.standard_streams import ENDED_BY_SIGPIPE
from mtp_export.schemes import SCHEMES
from object_server import ObjectServer
from pages import (
    DOCS,
    PAGES,
    README,
    ROOT,
    Block,
    anchors_of,
    blocks_of,
    code_in,
    paths_in,
    prose_of,
    rows_of,
    sections_of,
)

CLI = ROOT / "docs/cli.md"
MAKEFILE = (ROOT / "Makefile").read_text()
# The pages show a real model here; tests run the same commands on the trained miniature, which a
# local server has under the real model's name.
REAL_MODEL, MINIATURE = "/models/DeepSeek-V3", "fixtures/deepseek-v3-tiny"
PROMPTS = "fixtures/prompts.jsonl"
REPOSITORY = "deepseek-ai/DeepSeek-V3"
BUCKET, FOLDER = "weights", "DeepSeek-V3"
SHARED_SECTION = "Options of export and quantize"
COMMON_OPTIONS = {"--help", "--version", "--debug", "--install-completion", "--show-completion"}

# Pages whose Python needs more than the miniature, and the tests that run it.
RUN_ELSEWHERE = {
    "docs/engines.md": ("tests/verify/test_golden_file.py", "tests/engines/test_golden_vllm.py"),
}

BLOCKS = [block for page in (README, *DOCS) for block in blocks_of(page)]


def program_lines(block: Block) -> list[str]:
    """Commands of a bash block that run this program, on the miniature."""
    lines = [line.replace(REAL_MODEL, MINIATURE) for line in block.commands]
    return [line for line in lines if not line.startswith("make ")]


def shown_outputs() -> Iterator[tuple[Block, Block]]:
    """Output blocks, each with the bash block before it in its page."""
    before: Block | None = None
    for block in BLOCKS:
        if before is not None and before.page != block.page:
            before = None
        if block.language == "bash":
            before = block
        elif block.language == "" and before is not None:
            yield before, block


COMMANDS = list(
    dict.fromkeys(
        line for block in BLOCKS if block.language == "bash" for line in program_lines(block)
    )
)
BLOCKS_OF_README = [block for block in blocks_of(README) if block.language == "bash"]
SNIPPETS = [block for block in BLOCKS if block.language == "python"]
OUTPUTS = list(shown_outputs())


@dataclass
class Workplace:
    """Folder in which commands run, each once and after all those before it in the pages."""

    folder: Path
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def run(self, command: str) -> Outcome:
        for line in COMMANDS[len(self.outcomes) : COMMANDS.index(command) + 1]:
            program, *arguments = shlex.split(line)
            assert program == "mtp-export"
            self.outcomes[line] = run_program(*arguments)
        return self.outcomes[command]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Otherwise empty folder with a copy of the miniature, on the same device: links work."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(ROOT / MINIATURE, folder / MINIATURE)
    shutil.copy(ROOT / PROMPTS, folder / PROMPTS)
    return Workplace(folder)


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    """A local Hub that has the miniature."""
    server = HubServer()
    server.serve(REPOSITORY, ROOT / MINIATURE)
    with server.running():
        yield server


@pytest.fixture(scope="module")
def cloud() -> Iterator[dict[str, str]]:
    """Variables of a local object store that has the miniature."""
    server = ObjectServer()
    server.fill(BUCKET, FOLDER, ROOT / MINIATURE)
    with server.running():
        yield server.environment("s3")


@pytest.fixture
def workplace(
    shared: Workplace, hub: HubServer, cloud: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Workplace:
    """The shared folder as the current one, a local Hub and object store, and a terminal of 100
    columns."""
    monkeypatch.chdir(shared.folder)
    for name, value in {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": hub.token, **cloud}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "100")
    return shared


@pytest.mark.parametrize("command", COMMANDS, ids=lambda line: line.removeprefix("mtp-export "))
def test_command_runs(command: str, workplace: Workplace) -> None:
    outcome = workplace.run(command)
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda block: block.page)
def test_python_runs(snippet: Block, workplace: Workplace) -> None:
    if snippet.page == "README.md":
        workplace.run(program_lines(BLOCKS_OF_README[-1])[-1])
        exec(compile(snippet.text, snippet.page, "exec"), {})
    else:
        assert snippet.page in RUN_ELSEWHERE, "nothing runs this page's Python"
        for test in RUN_ELSEWHERE[snippet.page]:
            assert "python_of" in (ROOT / test).read_text()


@pytest.mark.parametrize(
    ("commands", "shown"),
    OUTPUTS,
    ids=lambda block: f"{block.page}: {block.text.split(chr(10))[0]}",
)
def test_output_is_what_is_shown(commands: Block, shown: Block, workplace: Workplace) -> None:
    printed = [steady(workplace.run(line).out) for line in program_lines(commands)]
    for part in pieces(steady(shown.text)):
        assert any(part in text for text in printed), f"{commands.page} shows:\n{part}"


def steady(text: str) -> str:
    """Return a text without what differs between runs and disks.

    That is durations, rates, the kind of link, and with them the widths of columns.
    """
    text = re.sub(r"\d+\.\d+ s\b", "N s", text)
    text = re.sub(r"\d+\.\d+ [kMG]?B/s", "N B/s", text)
    text = re.sub(r"([━─ ])\1+", r"\1", text.replace("(reflink)", "(hardlink)"))
    return "\n".join(line.rstrip() for line in text.splitlines())


def pieces(text: str) -> list[str]:
    """Return the runs of lines between lines that say that something was left out."""
    parts = re.split(r"^(?:│ )?…$", text, flags=re.M)
    return [part.strip("\n") for part in parts if part.strip()]


def test_the_comparison_of_outputs_can_fail() -> None:
    assert len(OUTPUTS) >= 4
    assert steady("in 2.0 s, 3.1 MB/s") == steady("in 9.7 s, 24.6 kB/s")
    assert steady("10.6 MB") != steady("10.7 MB")
    assert steady("━━┓\n in 2 (reflink) │") == steady("━━━┓\n in 2 (hardlink) │")
    assert pieces("a\nb\n│ …\nc\n") == ["a\nb", "c"]


def test_the_real_model_comes_first_and_make_does_the_set_up() -> None:
    first, second, *_ = [block for block in blocks_of(README) if block.language == "bash"]
    assert (len(first.commands), len(second.commands)) == (1, 4)
    assert all(REAL_MODEL in block.commands[0] for block in (first, second))
    named = {line for block in BLOCKS if block.language == "bash" for line in block.commands}
    targets = {line.split()[1] for line in named if line.startswith("make ")}
    assert targets >= {"demo", "test"}
    for target in targets:
        assert f"\n{target}:" in MAKEFILE


def test_the_readme_is_one_page() -> None:
    assert len(README.read_text().splitlines()) <= 150


# Options of the shared section that a command does without; its own section says so.
ELSEWHERE = {"graft": {"--input-dir", "--part"}}


def subcommands() -> dict[str, list[object]]:
    """Parameters of every command; the export's are the program's own."""
    found: dict[str, list[object]] = {"export": list(program().params)}
    for name, command in program().commands.items():
        found[name] = list(command.params)
    return found


def documented(command: str) -> dict[str, str]:
    """Options of a command and the defaults that docs/cli.md gives them."""
    sections = sections_of(CLI)
    names = {
        "export": [SHARED_SECTION],
        "quantize": ["Quantize", SHARED_SECTION],
        "graft": ["Graft", SHARED_SECTION],
    }
    text = "\n".join(sections[name] for name in names.get(command, [command.capitalize()]))
    rows = [row for row in rows_of(text) if row[0].startswith("`--") and len(row) == 3]
    codes = ((code.split()[0], default) for first, default, _ in rows for code in code_in(first))
    return {name: default for name, default in codes if name.startswith("--")}


@pytest.mark.parametrize("command", subcommands())
def test_every_option_is_explained_with_its_default(command: str) -> None:
    table = documented(command)
    options = {
        name: parameter.default  # type: ignore[attr-defined]
        for parameter in subcommands()[command]
        for name in parameter.opts  # type: ignore[attr-defined]
        if name.startswith("--") and name not in COMMON_OPTIONS
    }
    assert set(table) - COMMON_OPTIONS - ELSEWHERE.get(command, set()) == set(options)
    for name, default in options.items():
        cell = table[name]
        if cell.startswith("`"):
            assert cell.strip("`") == str(default), name
        elif not cell:
            assert not default, name
    for name in COMMON_OPTIONS:
        assert name in CLI.read_text() or name == "--help"


def test_every_target_and_scheme_is_explained() -> None:
    words = set(code_in(CLI.read_text()))
    assert set(target_names()) | set(SCHEMES) <= words
    engines = set(code_in(sections_of(README)["Engines and precisions"]))
    assert set(target_names()) - {"hf"} <= engines


def test_every_exit_code_is_explained() -> None:
    listed = {int(row[0]) for row in rows_of(sections_of(CLI)["Exit codes"])}
    codes = {
        item.exit_code
        for item in vars(errors).values()
        if isinstance(item, type) and issubclass(item, errors.MtpExportError)
    }
    assert listed == codes | {0, ENDED_BY_SIGPIPE}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_path_and_link_leads_somewhere(page: Path) -> None:
    text = prose_of(page)
    for path in paths_in(text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith("http"):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors_of(target), link


def test_the_index_has_every_page() -> None:
    linked = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs/index.md").read_text()))
    assert linked == {page.name for page in DOCS} - {"index.md"}

"""Chat templates: as transformers renders them, and cut off where they take too much."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from mtp_checkpoints.errors import InvalidInputError, MtpExportError, UsageError
from mtp_runtime.chat import Chat

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Tell me a <story> & more"},
    {"role": "assistant", "content": "Once upon a time"},
    {"role": "user", "content": "ünïcode \u2028 line"},
]
# Whitespace control, loop control, JSON, dates, namespaces: what templates of releases use.
TEMPLATES = [
    None,
    "{% for m in messages %}\n{% if loop.index0 == 2 %}{% continue %}{% endif %}"
    "    {{ m | tojson }}\n{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ bos_token }}{{ strftime_now('%Y') | length }}{{ messages[0].role | upper }}",
]


def folder_with(template: Any, source: Path, folder: Path, *, own_file: bool = False) -> Path:
    """A folder with the fixture's tokenizer and another template."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    if template is None:
        return folder
    if own_file:
        (folder / "chat_template.jinja").write_text(template)
        return folder
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("own_file", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_it_renders_as_transformers_does(
    template: str | None, own_file: bool, trained: Path, tmp_path: Path
) -> None:
    folder = folder_with(template, trained, tmp_path, own_file=own_file)
    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    chat = Chat(folder)
    assert chat.prompt(MESSAGES) == expected
    assert chat.prompt(MESSAGES) == expected, "the process serves more than one chat"


def test_of_several_templates_the_default_one_is_taken(trained: Path, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert Chat(folder_with(named, trained, tmp_path)).prompt(MESSAGES) == "yes"


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ '%99999999999d' % 1 }}",
        "{{ 'x'.ljust(10 ** 10) }}",
        "{% set x = ['x' * 5000000] %}{% for a in range(9) %}{{ x }}{{ x }}{% endfor %}",
    ],
)
def test_a_template_that_takes_too_much_is_cut_off(
    template: str, trained: Path, tmp_path: Path
) -> None:
    chat = Chat(folder_with(template, trained, tmp_path), seconds=0.5)
    for _ in range(2):
        with pytest.raises(MtpExportError, match=r"cut off|MemoryError|OverflowError"):
            chat.prompt(MESSAGES)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if messages[1] %}{{ nothing.at.all }}{% endif %}", "undefined"),
    ],
)
def test_a_template_that_refuses_is_quoted(
    template: str, words: str, trained: Path, tmp_path: Path
) -> None:
    chat = Chat(folder_with(template, trained, tmp_path))
    with pytest.raises(UsageError, match=words):
        chat.prompt(MESSAGES)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely|unsafe"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{% if messages[1] %}{{ ''.__class__.__mro__ }}{% endif %}", "unsafe"),
    ],
)
def test_a_template_that_renders_nothing_is_invalid_input(
    template: str, words: str, trained: Path, tmp_path: Path
) -> None:
    """Whatever the messages are, and also where it waits for some to leave its sandbox."""
    chat = Chat(folder_with(template, trained, tmp_path))
    with pytest.raises(InvalidInputError, match=f"cannot be rendered.*{words}"):
        chat.prompt(MESSAGES)


def test_no_template_and_one_too_large(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        Chat(tmp_path).prompt(MESSAGES)
    large = folder_with("x" * 10_000_000, trained, tmp_path, own_file=True)
    with pytest.raises(InvalidInputError, match="too large"):
        Chat(large).prompt(MESSAGES)

"""Dockerfile and compose.yaml: what they copy exists, and their commands are known ones."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtp_export.commands.registry import program

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


def known_options(words: list[str]) -> set[str]:
    """Options of the command that a command line names, or of the export."""
    command = program().commands.get(words[0], program())
    return {name for parameter in command.params for name in parameter.opts}


def command_lines() -> list[list[str]]:
    script = SERVICES["convert"]["command"][0]
    lines = re.findall(r"mtp-export (.*)", script)
    return [*(shlex.split(line) for line in lines), SERVICES["serve"]["command"]]


def test_every_option_is_known() -> None:
    lines = command_lines()
    assert [words[0] for words in lines] == ["--input-dir", "verify", "serve"]
    for words in lines:
        given = {word for word in words if word.startswith("--")}
        assert given <= known_options(words), words


def test_what_is_copied_exists_and_is_all_that_is_installed() -> None:
    copied = {
        word for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.M) for word in line.split()
    }
    assert all((ROOT / name).exists() for name in copied)
    allowed = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M))
    assert (
        allowed == copied >= {"mtp_export", "runtime", "checkpoints", "kernels", "pyproject.toml"}
    )


@pytest.mark.parametrize("service", SERVICES)
def test_services_have_few_rights(service: str) -> None:
    facts = SERVICES[service]
    assert facts["cap_drop"] == ["ALL"] and facts["read_only"] is True
    assert re.search(r"^USER user$", DOCKERFILE, re.M)
    assert all(port.startswith("127.0.0.1:") for port in facts.get("ports", []))

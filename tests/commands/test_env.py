"""The machine and its versions, as mtp-export env shows them: no token among them."""

from __future__ import annotations

import json

import pytest

from cases import run_program
from mtp_export import __version__
from mtp_export.commands import env

TOKEN = "hf_abcdefghijklmnopqrstuvwxyzabcdefgh"


def test_it_names_versions_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/kept/here")
    outcome = run_program("env", "--json")
    facts = json.loads(outcome.out)
    assert (outcome.code, outcome.err) == (0, "")
    assert facts["version"] == __version__ and facts["hub_token"] is True
    assert facts["kernel_cache"] == "/kept/here" and facts["free_disk_bytes"] > 0
    assert facts["torch"] and facts["cores"] >= 1
    assert TOKEN not in outcome.out + run_program("env").out


def test_doctor_is_its_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_has_token", lambda: False)
    shown = run_program("doctor").out
    assert "hub token" in shown and " no " in shown and __version__ in shown


def test_extras_are_those_whose_packages_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ['a>=1; extra == "x"', 'b[c]>=1; extra == "x"', 'a; extra == "y"', "torch>=2"]
    monkeypatch.setattr(env, "requires", lambda name: lines)
    monkeypatch.setattr(env, "_version", lambda name: {"a": "1"}.get(name))
    assert env._extras() == ["y"]
    monkeypatch.setattr(env, "_version", lambda name: {"a": "1", "b": "2"}.get(name))
    assert env._extras() == ["x", "y"]


@pytest.mark.parametrize(
    ("text", "units"), [("flags : fpu amx_tile amx_bf16\n", ["amx_bf16", "amx_tile"]), ("", [])]
)
def test_amx_units_are_the_processor_s(
    text: str, units: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pathlib.Path.read_text", lambda path: text)
    assert env._amx() == units


def test_an_internal_error_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(env, "environment_facts", lambda: 1 / 0)
    outcome = run_program("env")
    assert outcome.code == 1 and "mtp-export env" in outcome.err

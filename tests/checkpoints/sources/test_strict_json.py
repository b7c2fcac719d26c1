"""JSON as its standard has it: what Python's parser takes beyond it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cases import export, run_program
from mtp_checkpoints.sources import strict_json

DEEP = strict_json.MAX_DEPTH
BAD = {
    "NaN": ('{"a": NaN}', "NaN"),
    "infinity": ('[{"a": [Infinity]}]', "Infinity"),
    "negative infinity": ("-Infinity", "Infinity"),
    "a number beyond doubles": ('{"a": 1e999}', "1e999"),
    "a negative one": ('{"a": [-1.5E+400]}', "-1.5E"),
    "a key twice": ('{"a": 1, "a": 1}', "a"),
    "a key twice beside a colon in a string": ('{"a": ":", "b": {"c": 1, "c": 1}}', "c"),
    "another key than the first twice": ('{"a": 1, "b": 2, "b": 3, "c": 4}', "^the key 'b' twice$"),
    "an escaped key twice": (r'{"a": [{"b": 1, "\u0062": 2}]}', "b"),
    "nesting": ("[" * (DEEP + 1) + "]" * (DEEP + 1), "deeper"),
    "nesting of objects": ('{"a":' * (DEEP + 1) + "1" + "}" * (DEEP + 1), "deeper"),
    "nesting beyond any stack": ("[" * 100_000, "deeper"),
    "half of a surrogate pair": (r'{"a": "\ud800"}', "surrogate"),
    "the other half": (r'{"a": ["x\uDFFF"]}', "surrogate"),
    "half of one in large letters": (r'"\uDABC"', "surrogate"),
    "half of one in a key": (r'{"\udc00": 1}', "surrogate"),
    "a huge integer": ("1" * 5000, "digit"),
    "white space of other kinds": ("\u00a01", "Expecting value"),
    "nothing": ("", "Expecting value"),
}
GOOD = {
    r'{"a": "\ud83d\ude00"}': {"a": "\U0001f600"},
    '"\U0001f600"': "\U0001f600",
    "[" * DEEP + "1.5e308" + "]" * DEEP: None,
    "-0.0": 0.0,
    "[]": [],
    '{"a:b": {"a:b": ":"}, "c": [{"a": 1}, {"a": 1}]}': None,
    r'"\\ud800"': r"\ud800",
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str) -> None:
    text, says = BAD[case]
    with pytest.raises(ValueError, match=says):
        strict_json.parse(text.encode())


@pytest.mark.parametrize("text", GOOD)
def test_takes(text: str) -> None:
    expected = GOOD[text]
    assert strict_json.parse(text.encode()) == (json.loads(text) if expected is None else expected)


def test_refuses_bytes_that_are_no_text() -> None:
    for raw in (b'"\xff"', b'"\xed\xa0\x80"', '{"a": 1}'.encode("utf-16")):
        with pytest.raises(ValueError):
            strict_json.parse(raw)


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999"])
def test_a_config_without_a_number_is_never_exported(
    value: str, source: Path, output: Path
) -> None:
    path = source / "config.json"
    path.write_text(path.read_text().replace('"rope_theta": 10000', f'"rope_theta": {value}'))
    assert value in path.read_text()
    for outcome in (export(source, output), run_program("inspect", source)):
        assert outcome.code == 3 and value in outcome.err
    assert not output.exists()


def test_a_number_of_too_many_digits() -> None:
    with pytest.raises(ValueError, match="a whole number of thousands of digits"):
        strict_json.parse(b'{"a": ' + b"1" * 5000 + b"}")

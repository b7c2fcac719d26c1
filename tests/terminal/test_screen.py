"""The pseudo-terminal of the tests themselves: sizes, overwritten lines, pipes."""

from __future__ import annotations

from terminal.screen import Seen, in_pipe, in_terminal


def test_lines_are_those_that_stay() -> None:
    seen = Seen(0, "a 10 %\ra 100 %\r\n\x1b[32mdone\x1b[0m\r\n")
    assert seen.lines == ["a 100 %", "done"]
    assert seen.states == ["a 10 %", "a 100 %", "done"]
    assert seen.escapes == ["\x1b[32m", "\x1b[0m"]
    assert seen.wider_than(6) == ["a 100 %"]


def test_a_pipe_gets_no_escape() -> None:
    seen = in_pipe("verify", "--help")
    assert seen.code == 0 and "Usage" in seen.text
    assert seen.escapes == []


def test_help_fits_the_terminal() -> None:
    for columns in (80, 40):
        seen = in_terminal("verify", "--help", columns=columns)
        assert seen.code == 0
        assert seen.wider_than(columns) == []

"""Ctrl-C is told by its own words, wherever it comes."""

from __future__ import annotations

from mtp_checkpoints.errors import Interrupted
from mtp_export.commands.failures import failure_of


def within_a_call() -> SystemError:
    """As Python raises it where Ctrl-C comes while a compiled function takes its arguments."""
    error = SystemError("a function returned a result with an exception set")
    error.__cause__ = KeyboardInterrupt()
    return error


def test_ctrl_c_within_a_compiled_call_is_an_interrupt() -> None:
    assert failure_of(within_a_call()).exit_code == Interrupted.exit_code
    assert failure_of(SystemError("another")).exit_code == 1

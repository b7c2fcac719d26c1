"""Messages of errors: one line of a length that can be read."""

from __future__ import annotations

import pytest

from mtp_checkpoints.errors import MAX_MESSAGE, InvalidInputError, MtpExportError, UnsupportedError


@pytest.mark.parametrize("kind", [InvalidInputError, UnsupportedError])
@pytest.mark.parametrize("found", ["x" * 9_000_000, "\x1b[31m" * 10_000, "\ud800" * 3_000])
def test_long_messages_keep_both_ends(kind: type[MtpExportError], found: str) -> None:
    message = str(kind("The file is damaged", where="here", found=found, todo="Get it again"))
    assert len(message) <= MAX_MESSAGE and message.isprintable()
    assert message.startswith("The file is damaged (here)") and message.endswith("Get it again.")


def test_others_are_whole() -> None:
    found = "x" * (MAX_MESSAGE - 100)
    assert found in str(InvalidInputError("The file is damaged", found=found))

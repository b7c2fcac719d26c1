"""mtp-export serve: what it refuses before it listens."""

from __future__ import annotations

import socket

import pytest

from cases import run_program
from mtp_export.commands import serve
from mtp_export.serve.run import Address, listening
from serve.conftest import FIXTURE


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_NEEDED", ("starlette", "no_such_package"))
    outcome = run_program("serve", FIXTURE)
    assert outcome.code == 4
    assert "no no_such_package" in outcome.err and "mtp-export[serve]" in outcome.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--host", "0.0.0.0"), "--api-key"),
        (("--served-model-name", "a\udc80"), "--served-model-name"),
        (("--api-key", ""), "an empty one"),
        (("--api-key", "a\nb"), "a client can send"),
        (("--host", "0.0.0.0", "--api-key", " a"), "a client can send"),
        (("--enable-chunked-prefill", "maybe"), "neither true nor false"),
        (("--enable-prefix-cache", "--speculate-method", "draft_model"), "no prefix cache"),
        (("--max-batch-size", "0"), "--max-batch-size"),
        (("--max-model-len", "0"), "max_model_len of 1 to"),
    ],
)
def test_options_that_make_no_sense(options: tuple[str, ...], words: str) -> None:
    outcome = run_program("serve", FIXTURE, *options)
    assert outcome.code == 2 and words in outcome.err


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        outcome = run_program("serve", FIXTURE, "--port", port)
    assert outcome.code == 6 and "cannot listen" in outcome.err


def test_replies_are_sent_at_once() -> None:
    """The body of a reply would wait 40 ms for the client's confirmation of its head."""
    with listening(Address(port=0)) as listener:
        with socket.create_connection(listener.getsockname()):
            connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1

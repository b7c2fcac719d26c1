"""mtp-export serve: what it refuses before it listens."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys

import pytest

from cases import run_program
from forked import Forked, environment_of, program
from mtp_checkpoints.errors import IoError
from mtp_export.commands import serve
from mtp_export.serve import app
from mtp_export.serve.activity import Activity
from mtp_export.serve.address import Address
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.models.load import Loaded
from serve.conftest import FIXTURE
from serve.running import BANNER_END, Client, running, wait_for


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
        (("--max-model-len", "0"), "--max-model-len is out of range"),
    ],
)
def test_options_that_make_no_sense(options: tuple[str, ...], words: str) -> None:
    outcome = run_program("serve", FIXTURE, "--port", "0", *options)
    assert outcome.code == 2 and words in outcome.err


def test_a_port_that_is_taken_is_refused_before_a_model_is_loaded() -> None:
    """In a process of its own, to see that torch is not imported either."""
    code = (
        "import sys\nfrom mtp_export.cli import main\n"
        "try: main()\nfinally: print('torch' in sys.modules)"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-c", code, "serve", str(FIXTURE), "--port", str(port)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 6 and ended.stdout == "False\n"
    assert "The server cannot listen" in ended.stderr and "--port" in ended.stderr
    assert ended.stderr.count(f"127.0.0.1:{port}") == 1 == ended.stderr.count(str(port))


def test_a_port_that_is_taken_while_a_model_is_loaded_is_refused() -> None:
    address = Address(port=0)
    with address.bound() as bound, socket.socket() as other:
        place = bound.getsockname()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(place)
        other.listen()
        with pytest.raises(IoError, match="cannot listen"):
            address.listen(bound)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_clients_are_refused_until_the_server_listens(host: str) -> None:
    address = Address(host, port=0)
    with address.bound() as bound:
        place = bound.getsockname()[:2]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place)
        address.listen(bound)
        socket.create_connection(place).close()


def test_replies_are_sent_at_once() -> None:
    """The body of a reply would wait 40 ms for the client's confirmation of its head."""
    address = Address(port=0)
    with address.bound() as listener:
        address.listen(listener)
        with socket.create_connection(listener.getsockname()):
            connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_the_banner_says_where_to_look_and_what_to_try() -> None:
    """Its command is one that a shell takes."""
    banner = serve._banner("http://127.0.0.1:8000", "it's", has_key=False)
    first, second, third, *command, last = banner.splitlines()
    assert first.split() == ["Page", "http://127.0.0.1:8000/"]
    assert second == "API       http://127.0.0.1:8000/v1   (model: it's)"
    assert third.split() == ["Metrics", "http://127.0.0.1:8000/metrics"]
    assert last == BANNER_END and max(map(len, banner.splitlines())) <= 80
    words = shlex.split(" ".join(line.removesuffix("\\") for line in command))
    assert words[:3] == ["Try", "curl", "http://127.0.0.1:8000/v1/completions"]
    assert words[3:5] == ["-H", "Content-Type: application/json"]
    assert json.loads(words[-1]) == {"model": "it's", "prompt": "def read(", "max_tokens": 48}
    assert "$MTP_EXPORT_API_KEY" in serve._banner("http://x", "m", has_key=True)


def test_a_line_tells_of_busy_seconds(loaded: Loaded) -> None:
    llm = LLM(FIXTURE, loaded=loaded, speculate_method="mtp")
    activity = Activity(llm.engine)
    assert activity.line(10.0) is None
    llm.generate(["def read("], SamplingParams(max_tokens=40, ignore_eos=True))
    drafted, accepted = sum(llm.engine.totals.drafted), sum(llm.engine.totals.accepted)
    share = f"{accepted / drafted:.2f}"
    assert activity.line(10.0) == f"0 running, 0 waiting, 4 tokens/s, acceptance {share}"
    assert activity.line(10.0) is None
    (request,) = llm.requests(["def read("], [SamplingParams(max_tokens=40, use_drafts=False)])
    llm.engine.add(request)
    assert activity.line(10.0) == "0 running, 1 waiting, 0 tokens/s"
    llm.engine.step()
    llm.engine.step()
    assert activity.line(1.0) == "1 running, 0 waiting, 2 tokens/s"


def test_a_server_tells_of_its_activity(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SECONDS_BETWEEN_LINES", 0.1)
    told: list[str] = []
    llm = LLM(FIXTURE, loaded=loaded, speculate_method="mtp")
    with running(llm, tell=told.append) as server:
        client = server.client()
        client.post("/v1/completions", prompt="def read(", max_tokens=40)
        client.close()
        wait_for(lambda: any("acceptance 0." in line for line in told))
    assert re.match(r"\d running, 0 waiting, \d+ tokens/s", told[0])


def test_a_full_pipe_of_stderr_holds_up_no_request() -> None:
    """Not even the banner, nor the end."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * 4096)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = ("serve", FIXTURE, "--port", port)
    server = Forked(program, *words, streams=(0, 1, writer), environment=environment_of({}))
    try:
        wait_for(lambda: is_listening(port), 120)
        with contextlib.closing(Client(port)) as client:
            assert client.post("/v1/completions", prompt="a", max_tokens=2).status == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
        for descriptor in (reader, writer):
            os.close(descriptor)


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False

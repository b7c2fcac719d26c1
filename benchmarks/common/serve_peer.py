"""Servers as commands of their own: `mtp-export serve` and, as its peer, vLLM's on a CPU."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from benchmarks.common.vllm_peer import settings_of

_START_SECONDS = 300.0
_CONTEXT = 1024
_BATCH = 16
_OURS = [sys.executable, "-c", "from mtp_export.cli import main; main()", "serve"]


def ours(bundle: Path, drafts: int) -> list[str]:
    """The command of `mtp-export serve` in bf16."""
    method = ["--speculate-method", "mtp" if drafts else "none"]
    if drafts:
        method += ["--speculate-max-draft-token-num", str(drafts)]
    limits = ["--max-batch-size", str(_BATCH), "--max-model-len", str(_CONTEXT)]
    return [*_OURS, str(bundle), "--dtype", "bfloat16", *limits, *method]


def vllm(python: Path, bundle: Path, drafts: int) -> list[str]:
    """The command of vLLM's server in bf16, without graphs, as its CPU build is run elsewhere."""
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(bundle / "main"), "--dtype", "bfloat16", "--enforce-eager",
        "--max-model-len", str(_CONTEXT), "--max-num-seqs", str(_BATCH),
        "--no-enable-prefix-caching",
    ]  # fmt: skip
    if not drafts:
        return command
    speculation = {
        "method": "mtp",
        "model": str(bundle / "mtp"),
        "num_speculative_tokens": drafts,
    }
    return [*command, "--speculative-config", json.dumps(speculation)]


@contextmanager
def running(command: list[str]) -> Iterator[int]:
    """Run a server on a free port until the block ends; yields the port."""
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    prefix = Path(command[0]).parent.parent
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "2"}
    if "vllm" in command[2]:
        environment |= settings_of(prefix)
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            if not _answers(server, port):
                log.seek(0)
                raise SystemExit(f"no server: {log.read()[-3000:].decode(errors='replace')}")
            yield port
        finally:
            server.terminate()
            server.wait(60)


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until /health answers 200; False when the process has ended or the time is over."""
    end = time.monotonic() + _START_SECONDS
    while server.poll() is None and time.monotonic() < end:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return True
            except OSError:
                time.sleep(0.2)
    return False

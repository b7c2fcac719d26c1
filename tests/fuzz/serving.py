"""Bodies of requests sent to a server in this process, and what its answers must be."""

from __future__ import annotations

import json
from pathlib import Path

from fuzz.sandbox import Finding
from mtp_runtime import LLM
from serve.running import Reply, running, wait_for

_ERROR_FIELDS = {"message", "type", "param", "code"}
_MOST_BYTES = 20_000_000  # the server refuses more than 8 MiB
_ROOM_TOKENS = 256  # in the cache, and so the most that a body can ask for


def ask(folder: Path, model: Path) -> list[int]:
    """Send every body in a folder; return the statuses. A Finding for an answer that is neither
    what was asked for nor an error as clients read it, or a server that answers no more."""
    llm = LLM(model, speculate_method="mtp", cache_tokens=_ROOM_TOKENS, max_batch_size=4)
    statuses = []
    with running(llm) as server:
        client = server.client()
        for path in sorted(folder.glob("*.body")):
            if not path.is_file() or path.stat().st_size > _MOST_BYTES:
                continue
            name = "chat/completions" if path.stem == "chat" else "completions"
            kind = "application/json"
            reply = client.ask("POST", f"/v1/{name}", path.read_bytes(), Content_Type=kind)
            _check(reply, path.name)
            statuses.append(reply.status)
        after = client.post("/v1/completions", prompt="a", max_tokens=1)
        client.close()
        if after.status != 200:
            raise Finding("server", f"status {after.status} after a damaged body")
        wait_for(server.is_idle)
    return statuses


def _check(reply: Reply, name: str) -> None:
    shown = f"{name}: {reply.body[:2000]!r}"
    if reply.status == 200:
        streamed = reply.headers.get("content-type", "").startswith("text/event-stream")
        (_check_chunks if streamed else json.loads)(reply.body)
        return
    if not 400 <= reply.status < 500:
        raise Finding("server", f"status {reply.status}", shown)
    error = reply.json.get("error")
    if not isinstance(error, dict) or error.keys() != _ERROR_FIELDS or not error["message"]:
        raise Finding("server", "an error of another form", shown)


def _check_chunks(body: bytes) -> None:
    lines = [line for line in body.split(b"\n") if line]
    if not lines or lines[-1] != b"data: [DONE]":
        raise Finding("server", "a stream without an end", str(body[-500:]))
    for line in lines[:-1]:
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            raise Finding("server", "a stream that fails", str(chunk)[:2000])

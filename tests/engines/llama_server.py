"""llama.cpp's server on GGUF files, over HTTP: greedy texts, log-probabilities, and drafts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

_SECONDS = 300  # to load a small model on a busy machine
_CONTEXT = 512


def server() -> Path:
    """The program, as `make test-engines` builds it, or the one that LLAMA_SERVER names."""
    built = Path(sys.prefix, "llama.cpp/build/bin/llama-server")
    return Path(os.environ.get("LLAMA_SERVER", built))


@dataclass(frozen=True)
class Text:
    """A greedy text. best: by token the log-probabilities of the best ones, by token id, as far
    as the server gives them: a draft that is accepted has none, nor a token within a character."""

    tokens: list[int]
    best: list[dict[int, float]]
    drafted: int
    accepted: int


def first_file(folder: Path) -> Path:
    """The file that llama.cpp is given of a part."""
    return min(folder.glob("*.gguf"))


def texts_of(
    bundle: Path, drafts: int, prompts: Sequence[Sequence[int]], tokens: int, log: Path
) -> list[Text]:
    """Greedy texts of a bundle, with so many drafts per step; 0: its main model alone."""
    arguments: list[object] = ["-m", first_file(bundle / "main")]
    if drafts:
        apart = (bundle / "mtp").is_dir()  # else the module is in the main model's file
        arguments += ["-md", first_file(bundle / "mtp")] if apart else []
        arguments += ["--spec-type", "draft-mtp", "--spec-draft-n-max", drafts]
    with _serving(arguments, log) as address:
        return [_text(address, prompt, tokens) for prompt in prompts]


@contextmanager
def _serving(arguments: Sequence[object], log: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = ("--host", "127.0.0.1", "--port", port, "-c", _CONTEXT, "-np", 1, "-t", 1, "--no-warmup")
    words = [str(word) for word in (server(), *arguments, *own)]
    with log.open("w") as out, subprocess.Popen(words, stdout=out, stderr=out) as process:
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(process, address, log)
            yield address
        finally:
            process.terminate()


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urlopen(f"{address}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"not ready: {log.read_text()[-3000:]}")


def _text(address: str, prompt: Sequence[int], tokens: int) -> Text:
    settings = {"n_predict": tokens, "temperature": -1, "n_probs": 8, "repeat_penalty": 1}
    settings |= {"return_tokens": True, "cache_prompt": False, "ignore_eos": True}
    body = json.dumps(settings | {"prompt": list(prompt)}).encode()
    request = Request(f"{address}/completion", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=_SECONDS) as response:
        answer: dict[str, Any] = json.load(response)
    best = [*_best(answer["tokens"], answer["completion_probabilities"])]
    timings = answer["timings"]
    drafted, accepted = (timings.get(name, 0) for name in ("draft_n", "draft_n_accepted"))
    return Text(answer["tokens"], best, drafted, accepted)


def _best(tokens: Sequence[int], found: Sequence[dict[str, Any]]) -> Iterator[dict[int, float]]:
    """Those of each token, given those of some, in order."""
    known = iter(found)
    own = next(known, None)
    for token in tokens:
        if own is None or own["id"] != token:
            yield {}
        else:
            yield {one["id"]: one["logprob"] for one in own["top_logprobs"]}
            own = next(known, None)

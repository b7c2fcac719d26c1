"""Load on the server: requests that arrive at random times, and a fixed number at once.

    python -m benchmarks.bench_serve fixtures/deepseek-v3-tiny [--seconds 20] [--result FILE]
    python -m benchmarks.bench_serve fixtures/deepseek-v3-tiny --vllm-python VENV/bin/python

Plain decoding and MTP, with and without a prefix cache, each in a server of its own on a free port.
Closed loop: each of N clients sends its next request when the last one has ended. Open loop:
requests arrive as a Poisson process at shares of the rate that the closed loop of 16 reached,
whether the server keeps up or not. Then the same requests, 16 at a time, by the server and by
`generate` in turn.
Times are the client's: to the first token (TTFT), and per token after it (TPOT). With
--vllm-python the closed loops of 1 and 16 clients alone, of `mtp-export serve` and of vLLM's server
as commands on the same bf16 bundle, in turn, to serve_vllm.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import uvicorn

from benchmarks.common import serve_peer
from benchmarks.common.decoding import CONCURRENCIES, hardware
from mtp_export.bundle.build import run_bundle
from mtp_export.bundle.options import BundleOptions
from mtp_export.bundle.quantize import QuantizeOptions, plan_quantize
from mtp_export.serve.app import Server, ServerOptions
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.models.load import Loaded, LoadOptions, load_model

NEW_TOKENS = 64
BATCH, ROUNDS = 16, 7
PEER_CLIENTS, PEER_DRAFTS = (1, BATCH), 2
SHARES = (0.5, 0.8, 0.95)
RESULTS = Path("benchmarks/results")
WORDS = ("once", "upon", "a", "time", "there", "was", "a", "small", "house", "by", "the", "sea")
SYSTEM = " ".join(WORDS * 12)  # what prompts have in common


@dataclass(frozen=True)
class Timing:
    """One request: seconds to its first token, to its end, and its number of tokens."""

    first: float
    whole: float
    tokens: int

    @property
    def per_token(self) -> float:
        return (self.whole - self.first) / max(1, self.tokens - 1)


def prompt_of(number: int) -> str:
    """The words that all have in common, and twelve of its own."""
    return f"{SYSTEM} {' '.join(random.Random(number).choices(WORDS, k=12))}"


async def request(port: int, number: int) -> Timing:
    """Stream one answer."""
    body = {
        "prompt": prompt_of(number),
        "max_tokens": NEW_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    raw = json.dumps(body).encode()
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(raw)
    )
    writer.write(raw)
    first, tokens = 0.0, 0
    async for line in reader:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - start
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    writer.close()
    if not tokens:
        raise RuntimeError("a request was not answered")
    return Timing(first, time.perf_counter() - start, tokens)


async def closed_loop(port: int, clients: int, seconds: float) -> list[Timing]:
    """Keep so many requests under way."""
    found: list[Timing] = []
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        while time.perf_counter() < end:
            found.append(await request(port, number * 1000 + len(found)))

    await asyncio.gather(*(client(number) for number in range(clients)))
    return found


async def open_loop(port: int, rate: float, seconds: float) -> list[Timing]:
    """Let requests arrive at a rate, and wait for all."""
    own, tasks, start = random.Random(0), [], time.perf_counter()
    while time.perf_counter() - start < seconds:
        tasks.append(asyncio.create_task(request(port, len(tasks))))
        await asyncio.sleep(own.expovariate(rate))
    return list(await asyncio.gather(*tasks))


@asynccontextmanager
async def serving(llm: LLM) -> Any:
    """Serve while the block runs; yields the port."""
    config = uvicorn.Config(
        Server(llm, ServerOptions("bench")).app, port=0, log_config=None, access_log=False
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


async def measured(run: Callable[[], Awaitable[list[Timing]]]) -> dict[str, float]:
    """Tails of the times of a run, in milliseconds, and its rates."""
    start = time.perf_counter()
    timings = await run()
    elapsed = time.perf_counter() - start
    row = {
        "requests": len(timings),
        "requests_per_second": len(timings) / elapsed,
        "output_tokens_per_second": sum(t.tokens for t in timings) / elapsed,
    }
    for name, values in (
        ("ttft_ms", sorted(t.first for t in timings)),
        ("tpot_ms", sorted(t.per_token for t in timings)),
    ):
        row[f"{name}_mean"] = 1e3 * mean(values)
        for percent in (50, 90, 99):
            row[f"{name}_p{percent}"] = 1e3 * values[int(percent / 100 * (len(values) - 1))]
    return {key: round(value, 3) for key, value in row.items()}


async def rows_of(llm: LLM, seconds: float, clients: tuple[int, ...]) -> dict[str, Any]:
    """Closed loops of all numbers of clients, then open loops at shares of the rate of 16."""
    async with serving(llm) as port:
        await closed_loop(port, 4, 1.0)
        closed = {n: await measured(lambda n=n: closed_loop(port, n, seconds)) for n in clients}
        most = closed[BATCH]["requests_per_second"]
        opened = {
            share: await measured(lambda share=share: open_loop(port, share * most, seconds))
            for share in SHARES
        }
    return {"closed_loop": closed, "open_loop": opened}


async def some_requests(port: int, numbers: range) -> None:
    """Have each request answered, BATCH at a time."""
    waiting = list(numbers)

    async def client() -> None:
        while waiting:
            await request(port, waiting.pop())

    await asyncio.gather(*(client() for _ in range(BATCH)))


async def in_turns(llm: LLM) -> dict[str, Any]:
    """Output tokens per second of the server and of `generate` with the same requests, BATCH at a
    time, in turn: of every round, and the median of their ratios."""
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    rates: dict[str, list[float]] = {"server": [], "generate": []}
    async with serving(llm) as port:
        for turn in range(ROUNDS + 1):
            numbers = range(turn * 2 * BATCH, (turn + 1) * 2 * BATCH)
            prompts = [prompt_of(number) for number in numbers]
            start = time.perf_counter()
            await some_requests(port, numbers)
            served = time.perf_counter()
            for first in (0, BATCH):
                await asyncio.to_thread(llm.generate, prompts[first : first + BATCH], params)
            ended = time.perf_counter()
            if turn:  # the first one warms up
                rates["server"].append(len(prompts) * NEW_TOKENS / (served - start))
                rates["generate"].append(len(prompts) * NEW_TOKENS / (ended - served))
    ratios = [ours / plain for ours, plain in zip(*rates.values(), strict=True)]
    return rates | {"server_over_generate": median(ratios), "ratios": ratios}


def llm_of(source: Path, loaded: Loaded, method: str, *, prefix_cache: bool) -> LLM:
    llm = LLM(
        source,
        loaded=loaded,
        speculate_method=method,
        speculate_max_draft_token_num=2,
        prefix_cache=prefix_cache,
    )
    llm.warm_up()
    return llm


async def closed_rows(port: int, seconds: float) -> dict[int, dict[str, float]]:
    """Closed loops of 1 and 16 clients on a server that runs, after a first request each."""
    await closed_loop(port, BATCH, 1.0)
    return {n: await measured(partial(closed_loop, port, n, seconds)) for n in PEER_CLIENTS}


def against_vllm(python: Path, source: Path, seconds: float) -> dict[str, Any]:
    """Rows of both servers in bf16, plain and with MTP, and the ratios of output tokens."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bf16"
        options = QuantizeOptions(BundleOptions(source, bundle), "bf16", "bf16")
        run_bundle(plan_quantize(options), lambda _: None)
        for drafts in (0, PEER_DRAFTS):
            for name, command in (
                ("mtp-export serve", serve_peer.ours(bundle, drafts)),
                ("vllm serve", serve_peer.vllm(python, bundle, drafts)),
            ):
                with serve_peer.running(command) as port:
                    rows[f"{name}, {drafts} drafts"] = asyncio.run(closed_rows(port, seconds))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each row")
    parser.add_argument("--clients", type=int, nargs="+", default=CONCURRENCIES)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--vllm-python", type=Path, help="an interpreter that has vLLM")
    arguments = parser.parse_args()
    if arguments.vllm_python:
        rows = against_vllm(arguments.vllm_python, arguments.source, arguments.seconds)
        write(rows, arguments.result or RESULTS / "serve_vllm.json")
        return
    loaded = load_model(arguments.source, LoadOptions())
    clients = tuple(sorted({BATCH, *arguments.clients}))
    rows = {}
    for method in ("none", "mtp"):
        for prefix_cache in (False, True):
            llm = llm_of(arguments.source, loaded, method, prefix_cache=prefix_cache)
            name = f"{method}, {'prefix cache' if prefix_cache else 'no prefix cache'}"
            rows[name] = asyncio.run(rows_of(llm, arguments.seconds, clients))
            if not prefix_cache:  # what a turn leaves in the cache would serve the next one
                rows[name]["in_turns"] = asyncio.run(in_turns(llm))
    write(rows, arguments.result or RESULTS / "serve.json")


def write(rows: dict[str, Any], path: Path) -> None:
    """Write the rows with what they were measured on, and print them."""
    result = {"hardware": hardware(), "new_tokens": NEW_TOKENS, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

"""Load on the server: requests that arrive at random times, and a fixed number at once.

    python -m benchmarks.bench_serve fixtures/deepseek-v3-tiny [--seconds 20] [--result FILE]

Plain decoding and MTP, with and without a prefix cache, each in a server of its own on a free port.
Closed loop: each of N clients sends its next request when the last one has ended. Open loop:
requests arrive as a Poisson process at shares of the rate that the closed loop of 16 reached,
whether the server keeps up or not. Beside it `generate`'s own engine with 16 requests at once.
Times are the client's: to the first token (TTFT), and per token after it (TPOT).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import uvicorn

from benchmarks.bench_decode import CONCURRENCIES, hardware
from mtp_export.serve.app import Server, ServerOptions
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.models.load import Loaded, LoadOptions, load_model

NEW_TOKENS = 64
SHARES = (0.5, 0.8, 0.95)
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


async def request(port: int, number: int) -> Timing:
    """Stream one answer."""
    own = random.Random(number)
    body = {
        "prompt": f"{SYSTEM} {' '.join(own.choices(WORDS, k=12))}",
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
        most = closed[16]["requests_per_second"]
        opened = {
            share: await measured(lambda share=share: open_loop(port, share * most, seconds))
            for share in SHARES
        }
    return {"closed_loop": closed, "open_loop": opened}


def generate_rate(llm: LLM) -> float:
    """Output tokens per second of 16 requests at once, without a server."""
    prompts = [f"{SYSTEM} {' '.join(random.Random(n).choices(WORDS, k=12))}" for n in range(16)]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    llm.generate(prompts, params)
    start = time.perf_counter()
    for _ in range(3):
        llm.generate(prompts, params)
    return 3 * 16 * NEW_TOKENS / (time.perf_counter() - start)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each row")
    parser.add_argument("--clients", type=int, nargs="+", default=CONCURRENCIES)
    parser.add_argument("--result", type=Path, default=Path("benchmarks/results/serve.json"))
    arguments = parser.parse_args()
    loaded = load_model(arguments.source, LoadOptions())
    clients = tuple(sorted({16, *arguments.clients}))
    rows = {}
    for method in ("none", "mtp"):
        for prefix_cache in (False, True):
            llm = llm_of(arguments.source, loaded, method, prefix_cache=prefix_cache)
            name = f"{method}, {'prefix cache' if prefix_cache else 'no prefix cache'}"
            own = {"generate_output_tokens_per_second_16": round(generate_rate(llm), 1)}
            rows[name] = own | asyncio.run(rows_of(llm, arguments.seconds, clients))
    result = {"hardware": hardware(), "new_tokens": NEW_TOKENS, "rows": rows}
    arguments.result.parent.mkdir(parents=True, exist_ok=True)
    arguments.result.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

"""Many clients at once, of whom half hang up: every answer right, no page lost, memory flat."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

import pytest

from mtp_runtime import LLM, SamplingParams
from serve.conftest import FIXTURE
from serve.running import Client, Running, announced_port, wait_for

WORDS = ["sea", "wind", "of", "story", "night", "light", "to", "for", "in", "stone", "cold", "a"]
SAMPLES_PER_MINUTE = 12
# Of the model and a cache of 130 pages, each of which is soon used: what grows later is a leak.
MEMORY = "2GB"


@dataclass(frozen=True)
class Question:
    """A greedy request, and its text in plain decoding."""

    body: bytes
    text: str


@dataclass
class Load:
    """Clients that ask questions at random, and what came of it."""

    port: int
    questions: Sequence[Question]
    seconds: float
    right: int = 0
    hung_up: int = 0
    not_connected: int = 0

    async def run(self, clients: int) -> None:
        """Keep so many clients busy; every second one hangs up on all its requests."""
        self._end = time.monotonic() + self.seconds
        await asyncio.gather(*(self._client(number) for number in range(clients)))

    async def _client(self, number: int) -> None:
        random = Random(number)
        while time.monotonic() < self._end:
            question = random.choice(self.questions)
            if number % 2:
                with suppress(TimeoutError):
                    # Some before the request is read, some in its middle, some after its end.
                    await asyncio.wait_for(self._answer(question), random.expovariate(2))
                self.hung_up += 1
            else:
                assert await self._answer(question) == question.text
                self.right += 1

    async def _answer(self, question: Question) -> str:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except TimeoutError:  # the queue of new connections was full for two minutes
            self.not_connected += 1
            return await self._answer(question)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(question.body) + question.body
            )
            text, ended, is_full = "", False, b" 503 " in await reader.readline()
            async for line in reader:
                if line.startswith(b"data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                ended |= line.startswith(b"data: [DONE]")
            assert ended or is_full
        finally:
            writer.close()
        if not is_full:
            return text
        await asyncio.sleep(1)  # as Retry-After says
        return await self._answer(question)


def questions(plain: LLM, count: int) -> list[Question]:
    """Questions that share some of their beginnings, with answers of 1 to 48 tokens."""
    random = Random(0)
    bodies = [
        {
            "prompt": " ".join(WORDS[: random.randint(1, 12)] + random.choices(WORDS, k=4)),
            "max_tokens": random.randint(1, 48),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        for _ in range(count)
    ]
    params = [SamplingParams(max_tokens=body["max_tokens"], ignore_eos=True) for body in bodies]
    outputs = plain.generate([body["prompt"] for body in bodies], params)
    return [
        Question(json.dumps(body).encode(), output.text)
        for body, output in zip(bodies, outputs, strict=True)
    ]


def test_clients_that_hang_up_cost_the_others_nothing(served: Running, plain: LLM) -> None:
    load = Load(served.port, questions(plain, 16), seconds=1.5)
    asyncio.run(load.run(30))
    assert load.right >= 15 and load.hung_up >= 15
    wait_for(served.is_idle)


@contextmanager
def in_a_process() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Serve in a process of its own, with drafts and a prefix cache; yields it and its port."""
    command = [sys.executable, "-m", "mtp_export", "serve", str(FIXTURE), "--port", "0"]
    command += ["--speculate-method", "mtp", "--enable-prefix-cache", "--max-memory", MEMORY]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        yield process, announced_port(process.stderr)
    finally:
        process.terminate()
        process.wait(120)
        process.stderr.close()


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_five_hundred_clients_for_ten_minutes(plain: LLM) -> None:
    minutes = float(os.environ.get("LOAD_MINUTES", "10"))
    with in_a_process() as (process, port):
        load = Load(port, questions(plain, 64), seconds=60 * minutes)
        memory: list[int] = []

        async def watched() -> None:
            running = asyncio.create_task(load.run(500))
            while not running.done():
                await asyncio.wait([running], timeout=60 / SAMPLES_PER_MINUTE)
                memory.append(resident_bytes(process.pid))
            await running

        asyncio.run(watched())
        client = Client(port)
        wait_for(lambda: client.metric("vllm:num_requests_running") == 0)
        assert client.metric("vllm:num_requests_waiting") == 0
        assert client.metric("vllm:kv_cache_usage_perc") == 0
        client.close()
    print(
        f"{load.right} answers, {load.hung_up} hung up, {load.not_connected} not connected at once,"
        f" memory {memory}"
    )
    third = len(memory) // 3
    assert load.right > 50 * minutes
    assert median(memory[2 * third :]) <= 1.03 * median(memory[third : 2 * third])

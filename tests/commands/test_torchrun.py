"""The program on several ranks: started by torchrun, on one machine or as on two, and when one of
them ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from cases import export, run_program
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint
from runtime.ranks import launch_variables

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "fixtures/deepseek-v3-tiny"
FOLDERS = ("", "runtime", "checkpoints", "kernels")
PATHS = os.pathsep.join(str(ROOT / folder) for folder in FOLDERS)
GENERATE = ("--prompt", "The cat", "--prompt", "Once", "--max-new-tokens", "8", "--json")


def torchrun(size: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = ["--nproc-per-node", size, "--master-port", launch_variables(size)["MASTER_PORT"]]
    command = [sys.executable, "-m", "torch.distributed.run", *words, "-m", "mtp_export"]
    return subprocess.run(
        [str(word) for word in (*command, *arguments)],
        env=os.environ | {"PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        timeout=240,
    )


# Ways in which the agents of several machines find each other, by port and machine.
MEETINGS: dict[str, Callable[[str, int], tuple[object, ...]]] = {
    "first machine": lambda port, machine: (
        *("--node-rank", machine),
        *("--master-addr", "127.0.0.1", "--master-port", port),
    ),
    "rendezvous": lambda port, machine: (
        *("--rdzv-backend", "c10d", "--rdzv-id", "run", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("--local-addr", "127.0.0.1"),
    ),
}


def machines(count: int, meeting: str, *arguments: object) -> list[subprocess.Popen[str]]:
    """Agents of torchrun as on several machines, with a rank each."""
    port = launch_variables(count)["MASTER_PORT"]
    return [
        started(
            *("-m", "torch.distributed.run", "--nnodes", count, "--nproc-per-node", 1),
            *MEETINGS[meeting](port, machine),
            *("-m", "mtp_export", *arguments),
        )
        for machine in range(count)
    ]


def started(*arguments: object, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": PATHS} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def decoded(out: str) -> Any:
    return [(o["token_ids"], o["text"]) for o in json.loads(out)["outputs"]]


def test_rank_0_alone_prints_what_one_process_does(tmp_path: Path) -> None:
    """Of layers that torch runs: each rank would compile kernels for itself."""
    model = write_checkpoint(tmp_path / "model", SMALL_CONFIGS["deepseek_v32"])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [5, 6, 7]}\n{"prompt_token_ids": [8]}\n')
    options = (model, "--prompts", prompts, "--max-new-tokens", "8", "--max-model-len", "64")
    options += ("--json",)
    several = torchrun(2, "generate", *options)
    assert several.returncode == 0, several.stderr
    assert decoded(several.stdout) == decoded(run_program("generate", *options).out)


@pytest.mark.nightly
@pytest.mark.parametrize("meeting", MEETINGS)
def test_two_machines_print_what_one_process_does(meeting: str, tmp_path: Path) -> None:
    """Once: on the machine of rank 0."""
    model, prompts = write_checkpoint(tmp_path / "model"), tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [5, 6, 7]}\n{"prompt_token_ids": [8]}\n')
    options = (model, "--prompts", prompts, "--max-new-tokens", "8", "--json")
    agents = machines(2, meeting, "generate", *options)
    try:
        said = [agent.communicate(timeout=240) for agent in agents]
    finally:
        end_all(agents)
    assert [agent.returncode for agent in agents] == [0, 0], said
    (out,) = [out for out, _ in said if out]
    assert decoded(out) == decoded(run_program("generate", *options).out)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["gather", "reduce"])
def test_four_ranks_in_either_mode(mode: str) -> None:
    several = torchrun(4, "generate", FIXTURE, *GENERATE, "--parallel-mode", mode)
    assert several.returncode == 0, several.stderr
    assert decoded(several.stdout) == decoded(run_program("generate", FIXTURE, *GENERATE).out)


@pytest.mark.nightly
def test_verify_on_two_ranks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source")
    bundle = tmp_path / "bundle"
    assert export(tmp_path / "source", bundle, "--link", "copy", "--quiet").code == 0
    report = tmp_path / "report.json"  # some checks fail: the weights are random
    torchrun(2, "verify", bundle, "--max-new-tokens", 8, "--report", report, "--quiet")
    found = json.loads(report.read_text())
    items = {item["name"]: item for check in found["checks"] for item in check["items"]}
    assert items["tensor parallel 1 or 2, gather"]["status"] == "pass"


def test_other_commands_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in launch_variables(2).items() | {("RANK", "0")}:
        monkeypatch.setenv(name, value)
    outcome = run_program("inspect", FIXTURE)
    assert outcome.code == 2 and "runs in one process" in outcome.err


def test_tune_is_left_to_join_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in launch_variables(2).items() | {("RANK", "1")}:
        monkeypatch.setenv(name, value)
    outcome = run_program("tune")
    assert outcome.code == 2 and "--bundle" in outcome.err


def launched(size: int, *arguments: object) -> list[subprocess.Popen[str]]:
    """The ranks, without a launcher that ends them all when one does."""
    variables = launch_variables(size)
    return [
        started("-m", "mtp_export", *arguments, RANK=str(rank), **variables) for rank in range(size)
    ]


def ended(process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
    _, err = process.communicate(timeout=seconds)
    return process.returncode, err


def end_all(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def serving(process: subprocess.Popen[str]) -> str:
    """Wait until rank 0 serves; return its address."""
    from serve.running import announced_port

    assert process.stderr is not None
    return f"http://127.0.0.1:{announced_port(process.stderr)}"


def healthy(url: str) -> None:
    with urlopen(f"{url}/health", timeout=30) as answer:
        assert answer.status == 200


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_ends_the_others_with_a_message(
    number: signal.Signals, tmp_path: Path
) -> None:
    """While they serve and nobody asks anything; one that hangs is noticed by its silence."""
    pytest.importorskip("uvicorn")
    model = write_checkpoint(tmp_path / "model")
    processes = launched(3, "serve", model, "--port", 0, "--speculate-method", "none")
    try:
        healthy(serving(processes[0]))
        start = time.monotonic()
        processes[1].send_signal(number)
        for rank in (0, 2):
            code, err = ended(processes[rank], 30)
            assert code == 6, err
            assert err.count("mtp-export: error:") == 1, err
            assert "has ended or cannot be reached" in err and f"rank {rank} of 3" in err
        assert time.monotonic() - start < 30
    finally:
        end_all(processes)


@pytest.mark.nightly
def test_sigterm_of_the_first_rank_ends_all(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    model = write_checkpoint(tmp_path / "model")
    processes = launched(2, "serve", model, "--port", 0, "--speculate-method", "none")
    try:
        healthy(serving(processes[0]))
        processes[0].terminate()
        assert [ended(process, 30)[0] for process in processes] == [0, 0]
    finally:
        end_all(processes)


def completion(url: str, prompt: str) -> str:
    """The greedy completion of a prompt."""
    body = json.dumps({"model": FIXTURE.name, "prompt": prompt, "max_tokens": 8, "temperature": 0})
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"{url}/v1/completions", body.encode(), headers), timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def processes_of(agent: subprocess.Popen[str]) -> list[int]:
    """An agent of torchrun and its ranks."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    return [agent.pid, *map(int, children)]


@pytest.mark.nightly
def test_two_machines_serve_until_one_is_gone() -> None:
    """Completions are those of one process; the rank that is left says why it ends."""
    pytest.importorskip("uvicorn")
    agents = machines(2, "first machine", "serve", FIXTURE, "--port", 0)
    try:
        text = completion(serving(agents[0]), "The cat")
        options = ("--prompt", "The cat", "--max-new-tokens", "8", "--json")
        assert text == decoded(run_program("generate", FIXTURE, *options).out)[0][1]
        for process in processes_of(agents[1]):
            os.kill(process, signal.SIGKILL)
        code, err = ended(agents[0], 30)
        assert code and err.count("mtp-export: error:") == 1, err
        assert "has ended or cannot be reached" in err and "rank 0 of 2" in err
    finally:
        end_all(agents)

"""kill -9 at random moments of an export, a quantization, a calibration, a streamed verification
and a training: nothing that is left looks whole, and the same command ends with the same bytes."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import TimeoutExpired

import pytest
import torch

from bundle.commands import COMMANDS, Files, check_nothing_looks_whole, finish
from cases import (
    UNQUANTIZED,
    Outcome,
    export,
    looks_finished,
    make_checkpoint,
    nightly_but,
    quantize,
    run_program,
    tree,
)
from faults.matrix import no_progress
from forked import Forked
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import stream
from mtp_export.verify.options import VerifyOptions

Action = Callable[[], Outcome]
SEED = 9
# Of each command.
FEW, SOME, MANY = 2, 10, 50
CALIBRATIONS = [
    ("--base-quant", scheme, "--mtp-quant", scheme, *more, *main, "--method", method)
    for scheme, more in (
        ("weight_only_nvfp4", ()),
        ("weight_only_int4", ("--int4-scope", "all", "--group-size", "32")),
    )
    for main in ((), ("--calibrate-main",))
    for method in ("gptq", "awq")
]
CALIBRATIONS.append(
    ("--base-quant", "a4w4_nvfp4", "--mtp-quant", "a4w4_nvfp4", "--calibrate-main")
    + ("--measure-inputs",)
)
EVERY_PUSH = [("export, linked", FEW), ("quantize", FEW), ("quantize, GGUF", FEW)]


class Forks:
    """Runs in processes of their own, some of which are killed."""

    def run(self, action: Action, seconds: float | None = None) -> float | None:
        """Run to the end and return its seconds, or kill it after some and return None."""
        start = time.monotonic()
        process = Forked(_run, action)
        with suppress(TimeoutExpired):
            process.wait(seconds)
        process.kill()
        assert process.wait() in (0, -signal.SIGKILL), "it ends by itself or is killed"
        return None if process.wait() == -signal.SIGKILL else time.monotonic() - start

    def kills(self, number: int, start: Callable[[Path], Action], folder: Path) -> Iterator[Path]:
        """Kill a run at random moments; yield each output, also of a run that ended before."""
        print(f"seed {SEED}")
        chance = random.Random(f"{SEED} {folder.name}")
        seconds = self.run(start(folder / "whole"))
        for attempt in itertools.count():
            if not number:
                return
            output = folder / f"killed-{attempt}"
            whole = self.run(start(output), chance.uniform(0, seconds or 0))
            seconds = whole or seconds  # as long as a run takes now
            number -= whole is None
            yield output


def _run(action: Action) -> None:
    os._exit(action().code)


@pytest.fixture(scope="module")
def forks() -> Forks:
    return Forks()


@pytest.mark.parametrize(
    ("name", "kills"), nightly_but(EVERY_PUSH, itertools.product(COMMANDS, (FEW, MANY)))
)
def test_an_export_is_killed(
    name: str, kills: int, forks: Forks, many: Path, tmp_path: Path, wholes: dict[str, Files]
) -> None:
    command, before = COMMANDS[name], list[Files]()

    def prepared(output: Path) -> Action:
        before[:] = filter(None, [command.prepare(many, output)])
        return partial(command.run, many, output)

    for output in forks.kills(kills, prepared, tmp_path):
        check_nothing_looks_whole(output, [*before, wholes[name]])
        finish(command, many, output, wholes[name])


@pytest.fixture(scope="module")
def bundle(many: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle to be verified."""
    output = tmp_path_factory.mktemp("verified") / "bundle"
    assert export(many, output, "--quiet").code == 0
    return output


def verify(bundle: Path, texts: Path, workdir: Path) -> Outcome:
    """The streamed check, the one that keeps a state, in a folder; beside it what it said, whole or
    not at all, but for times."""
    options = VerifyOptions(bundle, prompts=texts, ks=(1,), stream=True, workdir=workdir)
    items = [*stream.run(Context.open(options, no_progress))]
    said = [repr(item) for item in items if item.name != "cost estimate"]
    written = Path(f"{workdir}.tmp")
    written.write_text("\n".join(said))
    written.rename(report_of(workdir))
    return Outcome(0, "", "")


def report_of(workdir: Path) -> Path:
    return Path(f"{workdir}.txt")


@pytest.mark.parametrize("kills", nightly_but([FEW], [FEW, MANY]))
def test_a_streamed_verification_is_killed(
    kills: int, forks: Forks, bundle: Path, tmp_path: Path
) -> None:
    texts = tmp_path / "texts.jsonl"
    text = {"prompt_token_ids": [*range(20)], "completion_token_ids": [*range(30, 90)]}
    texts.write_text(json.dumps(text))
    for workdir in forks.kills(kills, partial(partial, verify, bundle, texts), tmp_path):
        if not report_of(workdir).exists():
            forks.run(partial(verify, bundle, texts, workdir))
        assert report_of(workdir).read_text() == report_of(tmp_path / "whole").read_text() != ""
        assert not workdir.exists() or tree(workdir) == {}


def calibrate(source: Path, texts: Path, options: tuple[str, ...], output: Path) -> Outcome:
    """A short calibration; its work folder, beside the output, keeps rows, inputs and codes."""
    torch.set_num_threads(1)
    given = (*options, "--allow-untested-pair", "--calibrate", texts, "--quiet")
    return quantize(source, output, *given)


@pytest.fixture(scope="module")
def unquantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bf16: scales of AWQ beside int4 fold into no shared experts in fp8."""
    folder = tmp_path_factory.mktemp("unquantized") / "source"
    return make_checkpoint(folder, UNQUANTIZED, max_shard_bytes=80_000)


@pytest.mark.nightly
@pytest.mark.parametrize("options", CALIBRATIONS, ids=" ".join)
def test_a_calibration_is_killed(
    options: tuple[str, ...], forks: Forks, unquantized: Path, tmp_path: Path
) -> None:
    texts = tmp_path / "texts.jsonl"
    lines = [
        {"prompt_token_ids": [*range(5, 9 + n)], "completion_token_ids": [*range(30, 50)]}
        for n in range(6)
    ]
    texts.write_text("\n".join(map(json.dumps, lines)))
    start = partial(partial, calibrate, unquantized, texts, options)
    for output in forks.kills(SOME, start, tmp_path):
        whole = tree(tmp_path / "whole")
        check_nothing_looks_whole(output, [whole])
        if not looks_finished(output):
            forks.run(start(output))
        assert tree(output) == whole


def train(bundle: Path, texts: Path, output: Path) -> Outcome:
    """A short training; its work folder, beside the output, keeps rows and states."""
    torch.set_num_threads(1)
    lengths = ("--max-new-tokens", 4, "--max-text-tokens", 32, "--batch-tokens", 64)
    places = ("--bundle", bundle, "--data", texts, "--output-dir", output)
    return run_program("tune", *places, *lengths, "--steps", 4, "--k", 2, "--quiet")


@pytest.mark.parametrize("kills", nightly_but([], [FEW, MANY]))
def test_a_training_is_killed(kills: int, forks: Forks, bundle: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    lines = [{"prompt_token_ids": [*range(5, 9 + number)]} for number in range(6)]
    texts.write_text("\n".join(map(json.dumps, lines)))
    for output in forks.kills(kills, partial(partial, train, bundle, texts), tmp_path):
        whole = tree(tmp_path / "whole")
        check_nothing_looks_whole(output, [whole])
        if not looks_finished(output):
            forks.run(partial(train, bundle, texts, output))
        assert tree(output) == whole

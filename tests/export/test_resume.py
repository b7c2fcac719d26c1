"""A run that is cut short at any moment goes on when the same command runs again, and ends with
the same bytes as one that was never interrupted."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import TINY_CONFIG, export, make_checkpoint, read_json, tree

# Many small files, so that there is much to interrupt; --link copy has the main part written too.
OPTIONS = ("--max-shard-size", "60kB", "--link", "copy", "--workers", "2", "--quiet")
MANIFEST, JOURNAL = "mtp_export.json", ".mtp_export.journal"
DISK_CALLS = ("open", "posix_fallocate", "pwrite", "fsync", "replace", "unlink", "close")


def die_at(call_number: int) -> None:
    """From now on, the n-th call that touches a disk ends this process, as kill -9 would."""
    calls = iter(range(1, 1 << 30))

    def counted(real: object) -> object:
        def wrapper(*arguments: object, **options: object) -> object:
            if next(calls) == call_number:
                os._exit(9)
            return real(*arguments, **options)  # type: ignore[operator]

        return wrapper

    for name in DISK_CALLS:
        setattr(os, name, counted(getattr(os, name)))


def run_in_a_fork(source: Path, output: Path, call_number: int) -> int:
    """Exit code of an export in a child process that dies at a disk call (9), or gets through."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            die_at(call_number)
            code = export(source, output, *OPTIONS).code
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.fixture(scope="module")
def whole(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The bundle of an uninterrupted run."""
    output = tmp_path_factory.mktemp("whole") / "output"
    assert export(pristine, output, *OPTIONS).code == 0
    return tree(output)


def looks_finished(output: Path) -> bool:
    return (output / MANIFEST).exists() and not (output / JOURNAL).exists()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_death_at_every_disk_call(pristine: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    died = resumed = 0
    for call_number in range(1, 2000, 3):
        output = tmp_path / f"died-at-{call_number}"
        if run_in_a_fork(pristine, output, call_number) == 0:
            break
        died += 1
        if not looks_finished(output):
            outcome = export(pristine, output, *OPTIONS)
            assert outcome.code == 0, (call_number, outcome.err)
            resumed += 1
        assert tree(output) == whole, call_number
    else:
        pytest.fail("the run never got through")
    assert died > 50
    assert resumed > 50


def start(source: Path, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from mtp_export.cli import main; main()"]
    arguments = ["--input-dir", str(source), "--output-dir", str(output), *OPTIONS]
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen(command + arguments, env=environment, stderr=subprocess.PIPE)


def wait_for_writing(process: subprocess.Popen[bytes], output: Path) -> None:
    while process.poll() is None and not list(output.glob("*/.*.tmp")):
        time.sleep(0.001)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough to write that a signal finds the run at work."""
    config = TINY_CONFIG | {"vocab_size": 60_000, "n_routed_experts": 64}
    return make_checkpoint(tmp_path_factory.mktemp("larger") / "source", config)


@pytest.fixture(scope="module")
def larger_whole(larger: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("larger_whole") / "output"
    assert export(larger, output, *OPTIONS).code == 0
    return tree(output)


def moments() -> Iterator[float]:
    """Seconds after the first byte."""
    yield 0.0
    chance = random.Random(61)
    yield from (chance.uniform(0.0, 1.0) for _ in range(5))


@pytest.mark.parametrize("seconds", list(moments()))
def test_kill_9(seconds: float, larger: Path, output: Path, larger_whole: dict[str, bytes]) -> None:
    process = start(larger, output)
    wait_for_writing(process, output)
    time.sleep(seconds)
    process.kill()
    process.communicate()
    if not looks_finished(output):
        assert export(larger, output, *OPTIONS).code == 0
    assert tree(output) == larger_whole


def test_ctrl_c(larger: Path, output: Path, larger_whole: dict[str, bytes]) -> None:
    process = start(larger, output)
    wait_for_writing(process, output)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err.decode().count("\n") == 1
    assert "goes on where it stopped" in err.decode()
    assert not list(output.glob("*/.*.tmp"))
    assert not (output / MANIFEST).exists()
    assert export(larger, output, *OPTIONS).code == 0
    assert tree(output) == larger_whole


@pytest.fixture
def unfinished(source: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output that a failing disk left unfinished after its third shard."""
    with monkeypatch.context() as patch:
        real, calls = os.posix_fallocate, [0]

        def fail(*arguments: int) -> None:
            calls[0] += 1
            if calls[0] > 3:
                raise OSError(5, "Input/output error")
            real(*arguments)

        patch.setattr(os, "posix_fallocate", fail)
        assert export(source, output, *OPTIONS, "--workers", "1").code == 6
    assert len(list(output.glob("*/model-*"))) == 3
    return output


def test_finished_shards_are_not_written_again(source: Path, unfinished: Path) -> None:
    before = {path: path.stat().st_ino for path in unfinished.glob("*/model-*")}
    outcome = export(source, unfinished, *OPTIONS[:-1], "--json", "--workers", "3")
    assert outcome.code == 0, outcome.err
    assert '"resumed_shards": 3' in outcome.out
    assert {path: path.stat().st_ino for path in before} == before


def test_a_finished_shard_that_changed_size_is_written_again(
    source: Path, unfinished: Path, whole: dict[str, bytes]
) -> None:
    os.truncate(next(iter(sorted(unfinished.glob("*/model-*")))), 100)
    assert export(source, unfinished, *OPTIONS).code == 0
    assert tree(unfinished) == whole


def test_a_changed_source_is_refused(source: Path, unfinished: Path) -> None:
    shard = next(iter(sorted(source.glob("*.safetensors"))))
    stat = shard.stat()
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    before = tree(unfinished)
    outcome = export(source, unfinished, *OPTIONS)
    assert outcome.code == 8
    assert shard.name in outcome.err
    assert "unfinished" in outcome.err
    assert tree(unfinished) == before
    assert export(source, unfinished, *OPTIONS, "--no-resume").code == 0


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--target", "xllm"), "target"),
        (("--part", "main"), "part"),
        (("--shared-weights", "drop"), "shared_weights"),
    ],
)
def test_changed_options_are_refused(
    option: tuple[str, str], says: str, source: Path, unfinished: Path
) -> None:
    outcome = export(source, unfinished, *OPTIONS, *option)
    assert outcome.code == 8
    assert says in outcome.err
    assert option[1] in outcome.err


def test_two_runs_do_not_share_an_output(larger: Path, output: Path) -> None:
    process = start(larger, output)
    wait_for_writing(process, output)
    outcome = export(larger, output, *OPTIONS)
    process.kill()
    process.communicate()
    assert outcome.code == 8
    assert "Another run" in outcome.err


def test_the_manifest_says_what_was_done(pristine: Path, output: Path) -> None:
    import xxhash
    from safetensors import safe_open

    assert export(pristine, output, "--target", "xllm").code == 0
    manifest = read_json(output / MANIFEST)
    assert manifest["options"]["target"] == "xllm"
    for name, facts in manifest["source"]["shards"].items():
        assert (pristine / name).stat().st_size == facts["size_bytes"]
    operations = set()
    for part, content in manifest["parts"].items():
        for name, facts in content["shards"].items():
            path = output / part / name
            assert path.stat().st_size == facts["size_bytes"]
            if "link" in facts:
                assert (pristine / facts["source_shard"]).samefile(path)
                continue
            with safe_open(path, framework="np") as shard:
                assert sorted(shard.keys()) == sorted(facts["tensors"])
            raw = path.read_bytes()
            length = int.from_bytes(raw[:8], "little")
            import json

            header = json.loads(raw[8 : 8 + length])
            for tensor, entry in facts["tensors"].items():
                start_, end = header[tensor]["data_offsets"]
                data = raw[8 + length + start_ : 8 + length + end]
                assert xxhash.xxh3_128(data).hexdigest() == entry["xxh3_128"]
                operations.add(entry["operation"])
        for name, facts in content["files"].items():
            data = (output / part / name).read_bytes()
            assert xxhash.xxh3_128(data).hexdigest() == facts["xxh3_128"]
    assert operations == {"copy", "dequantize_fp8_block"}

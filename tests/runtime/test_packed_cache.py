"""Weights kept as they are packed are mapped by the next start; nothing stale or broken is used."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cases import WHOLE_TILES, make_checkpoint, quantize, run_program
from forked import forks
from mtp_checkpoints.errors import InvalidInputError, IoError, UnsupportedError, UsageError
from mtp_checkpoints.formats import unquantized
from mtp_kernels.cpu import packed_file
from mtp_kernels.decoder import Piece
from mtp_runtime.layers.linear import Linear
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.models.model import Model
from mtp_runtime.models.packing import Rows
from quantize_rows import INT8_HEAD
from runtime.checkpoints import GLM4_MOE, SMALL, SMALL_CONFIGS, write_checkpoint
from runtime.harness import Walk

GLM = Path(__file__).resolve().parents[2] / "fixtures/glm4-moe-tiny"
TOKENS = [3, 1, 2, 0, 3]
PLAIN = {"mla": SMALL, "gqa": GLM4_MOE, "gated delta": SMALL_CONFIGS["qwen3_next"]}


@pytest.fixture(scope="module", params=["int4", *PLAIN])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    if request.param in PLAIN:
        return write_checkpoint(path, PLAIN[request.param])
    source = make_checkpoint(path / "source", WHOLE_TILES)
    options = ("--base-quant", "weight_only_int4", "--mtp-quant", "weight_only_int8")
    linears = ("--int4-scope", "linears", "--group-size", "32", *INT8_HEAD)
    assert quantize(source, path / "bundle", *options, *linears).code == 0
    return path / "bundle"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", SMALL | {"num_hidden_layers": 2})


def load(path: Path, kept: Path | None) -> Model:
    return load_model(path, LoadOptions(packed_cache=kept)).model


def outputs(model: Model) -> list[torch.Tensor]:
    """Logits and states of the main model, and of the module on them."""
    logits, before, after = Walk(model).feed(TOKENS)
    assert model.mtp is not None
    return [logits, before, model.mtp.head.logits(model.mtp.head.normed(after))]


def is_equal(first: Model, second: Model) -> bool:
    return all(map(torch.equal, outputs(first), outputs(second)))


def no_pieces(rows: Rows) -> Iterator[Piece]:
    raise AssertionError(f"{rows.shape} was read")


def test_the_next_start_reads_no_matrix(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, written = load(folder, None), load(folder, tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".packed" and is_equal(plain, written)
    monkeypatch.setattr(Rows, "pieces", no_pieces)
    assert is_equal(plain, load(folder, tmp_path))
    with pytest.raises(AssertionError, match="was read"):
        load(folder, None)


def test_another_model_at_the_same_place_is_packed_anew(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    before = load(model, kept)
    (first,) = kept.iterdir()
    (kept / f"{first.name}.part").touch()  # of a process that was killed
    write_checkpoint(model, SMALL | {"num_hidden_layers": 2}, seed=1)
    after = load(model, kept)
    (second,) = kept.iterdir()
    assert first != second and is_equal(after, load(model, None)) and not is_equal(before, after)


def test_what_is_packed_after_the_model_is_in_other_memory(model: Path, tmp_path: Path) -> None:
    """As drafts are that share the model's kernels: of a first start and of a later one."""
    kept = tmp_path / "kept"
    matrix, x = torch.randn(4096, 64), torch.randn(3, 64)
    sizes = []
    for _ in range(2):
        loaded = load(model, kept)
        projection = loaded.execution.linear(
            Linear.build(unquantized(matrix), torch.float32, keep_dense=True)
        )
        assert torch.allclose(projection(x), x @ matrix.T, atol=1e-4)
        assert is_equal(loaded, load(model, None))
        sizes += [path.stat().st_size for path in kept.iterdir()]
    assert len({*sizes}) == 1 < len(sizes)


def test_each_way_of_loading_has_its_file(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    for options in (LoadOptions(), LoadOptions(dtype="bfloat16"), LoadOptions(with_mtp=False)):
        load_model(model, LoadOptions(**vars(options) | {"packed_cache": kept}))
    assert len([*kept.iterdir()]) == 3


def test_numbers_that_are_damaged_are_packed_anew(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    load(model, kept)
    (file,) = kept.iterdir()
    content = bytearray(file.read_bytes())
    start = content.rindex(b"[")
    content[start] = 0
    file.write_bytes(content)
    assert is_equal(load(model, None), load(model, kept))
    assert file.read_bytes()[start] == ord("[")


def test_a_system_that_maps_no_pages_beforehand_reads_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, expected = tmp_path / "kept", load(model, None)
    load(model, kept)
    monkeypatch.setattr(packed_file, "_POPULATE_READ", 12345)
    assert is_equal(expected, load(model, kept))


@pytest.mark.parametrize("size", [0, 10, 4096, -1])
def test_a_damaged_file_is_packed_anew(size: int, model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    load(model, kept)  # and dropped: what is mapped must not be cut
    (file,) = kept.iterdir()
    whole = file.stat().st_size
    os.truncate(file, size % whole)
    assert is_equal(load(model, None), load(model, kept))
    assert file.stat().st_size == whole


def test_weights_of_another_model_are_refused(model: Path, tmp_path: Path) -> None:
    kept, other = tmp_path / "kept", write_checkpoint(tmp_path / "other", GLM4_MOE)
    load(model, kept)
    (file,) = kept.iterdir()
    load(other, tmp_path / "kept of other")
    (of_other,) = (tmp_path / "kept of other").iterdir()
    of_other.replace(file)
    with pytest.raises(InvalidInputError, match="does not hold this model") as raised:
        load(model, kept)
    assert raised.value.where == file


def test_a_file_that_holds_more_is_refused(model: Path, tmp_path: Path) -> None:
    """That of the model with its MTP module, in place of the one without."""
    kept = tmp_path / "kept"
    load(model, kept)
    (larger,) = kept.iterdir()
    without = LoadOptions(packed_cache=kept, with_mtp=False)
    load_model(model, without)
    (smaller,) = {*kept.iterdir()} - {larger}
    larger.replace(smaller)
    with pytest.raises(InvalidInputError, match="holds more than was taken"):
        load_model(model, without)


def test_what_ended_before_it_was_whole_is_not_used(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    expected = load(model, kept)
    (file,) = kept.iterdir()
    file.rename(f"{file}.part")  # of a process that was killed
    assert is_equal(expected, load(model, kept))
    assert [*kept.iterdir()] == [file]


def _killed_while_loading(path: Path, kept: Path) -> None:
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # before the file has its name
    load(path, kept)


def test_what_a_killed_process_left_is_written_over(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    process = forks().Process(target=_killed_while_loading, args=(model, kept))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    (part,) = kept.iterdir()
    assert part.suffix == ".part"
    assert is_equal(load(model, None), load(model, kept))
    (file,) = kept.iterdir()
    assert file.suffix == ".packed"


def test_two_processes_do_not_write_one_file(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    expected = load(model, kept)
    (file,) = kept.iterdir()
    file.unlink()
    with open(f"{file}.part", "wb") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        assert is_equal(expected, load(model, kept))
        assert part.tell() == os.fstat(part.fileno()).st_size == 0
    assert not file.exists()


def test_a_full_disk(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    kept = tmp_path / "kept"
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(IoError, match="No space left"):
        load(model, kept)
    assert [*kept.iterdir()] == []


def test_options_that_keep_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Only the compiled kernels pack"):
        LoadOptions(packed_cache=tmp_path, dequantize_at_load=False)
    with pytest.raises(UsageError, match="--packed-cache"):
        LoadOptions(packed_cache=tmp_path, expert_bytes=1 << 20)


def test_the_command_keeps_weights_and_says_why_it_cannot(tmp_path: Path) -> None:
    words = ("generate", GLM, "--prompt", "def f", "--max-new-tokens", "4")
    texts = []
    for more in ((), ("--packed-cache", tmp_path / "kept"), ("--packed-cache", tmp_path / "kept")):
        outcome = run_program(*words, *more)
        assert outcome.code == 0, outcome.err
        texts.append(outcome.out.partition("\n4 tokens")[0])
    assert texts[0] == texts[1] == texts[2]
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "kept", Path("/proc/none")):
        outcome = run_program(*words, "--packed-cache", folder)
        assert outcome.code == 6 and "Packed weights cannot be kept" in outcome.err

"""The streamed pass compared with the engine: the same acceptance on the same text, one layer in
memory at a time, and an interrupted run resumes."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pickle
import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import export, read_json, run_program
from faults.matrix import no_progress
from mtp_checkpoints.containers.base import TensorInfo
from mtp_checkpoints.errors import UsageError
from mtp_checkpoints.tensors.tensor_reader import TensorReader
from mtp_export.verify.check import Item, Level, Status
from mtp_export.verify.context import Context
from mtp_export.verify.decoding import stream, stream_cost
from mtp_export.verify.decoding.acceptance import conditional
from mtp_export.verify.decoding.pass_folder import STATE_NAME, pass_folder
from mtp_export.verify.evidence.decode import decode
from mtp_export.verify.options import VerifyOptions
from mtp_runtime.layers.decoder_layer import DecoderLayer
from mtp_runtime.models.load import LoadOptions, load_model
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.streaming import StreamedModel, open_streamed
from mtp_runtime.teacher_forcing import PagedTexts, Text, Texts

PROMPTS = [(17, 250, 31, 77, 5, 90), (400, 12, 13, 14), (55, 56, 57, 58, 59, 60, 61), (900, 3, 8)]
K = 2


@pytest.fixture(scope="module")
def bundle(trained_bundle: Path) -> Path:
    return trained_bundle


@pytest.fixture(scope="module")
def engine(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The engine's generated texts as a prompts file, and its acceptance by position."""
    model = load_model(bundle, LoadOptions()).model
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    decoded = decode(model, PROMPTS, params, method="mtp", k=K)
    lines = [
        json.dumps({"prompt_token_ids": prompt, "completion_token_ids": list(output)})
        for prompt, output in zip(PROMPTS, decoded.outputs, strict=True)
    ]
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("\n".join(lines))
    found = [conditional(decoded, position) for position in range(K)]
    return path, [estimate.value for estimate in found if estimate is not None]


def context_of(bundle: Path, prompts: Path, workdir: Path, mtp: Path | None = None) -> Context:
    options = VerifyOptions(
        bundle, level=Level.RUN, prompts=prompts, ks=(K,), stream=True, workdir=workdir, mtp=mtp
    )
    return Context.open(options, no_progress)


def in_blocks(items: list[Item]) -> list[float]:
    return [item.data["in_blocks"]["value"] for item in items if "in_blocks" in item.data]


def test_acceptance_equals_the_engines(
    bundle: Path, engine: tuple[Path, list[float]], tmp_path: Path
) -> None:
    """Tolerance 0: a near-tie between prefill and decoding would have to lie on these tokens."""
    prompts, wanted = engine
    items = list(stream.run(context_of(bundle, prompts, tmp_path)))
    assert [item.name for item in items if item.status is Status.FAIL] == []
    assert in_blocks(items) == wanted
    assert list(tmp_path.iterdir()) == [], "a finished pass leaves its state behind"


def test_main_and_mtp_part_in_two_places(
    bundle: Path, engine: tuple[Path, list[float]], tmp_path: Path
) -> None:
    prompts, wanted = engine
    context = context_of(bundle / "main", prompts, tmp_path, mtp=bundle / "mtp")
    items = list(stream.run(context))
    assert [item.name for item in items if item.status is not Status.PASS] == []
    assert in_blocks(items) == wanted
    text = pickle.dumps(stream._Division(Path("a"), Path("b"), "cpu", None, (), ()))
    division = pickle.loads(text)
    assert (division.mtp, division.device, division.opened) == (Path("b"), "cpu", None)


def test_texts_from_a_pipe(bundle: Path, tmp_path: Path) -> None:
    """A pipe gives its lines once."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as lines:
        lines.write('{"prompt_token_ids": [5, 6], "completion_token_ids": [7, 8, 9]}\n')
    context = context_of(bundle, Path(f"/dev/fd/{reading}"), tmp_path)
    assert context.prompts == ((5, 6),)
    assert stream.texts_of(context) == (Texts((Text((5, 6, 7, 8, 9), 2),)), True)
    os.close(reading)


def test_picked_experts_alone_are_read_and_each_once(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of four tokens, cut into two chunks, picks a few experts of every layer."""
    read: Counter[str] = Counter()
    real = TensorReader.__init__

    def counting(self: TensorReader, info: TensorInfo, *, once: bool = False) -> None:
        read[info.name] += 1
        real(self, info, once=once)

    prompts = tmp_path / "texts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": [400, 12, 13, 14]}))
    context = context_of(bundle, prompts, tmp_path / "state")
    streamed, (texts, _) = open_streamed(bundle, "cpu"), stream.texts_of(context)
    cost = stream_cost.cost_of(context, streamed, texts)
    chunks = partial(PagedTexts.chunks, size=2)
    monkeypatch.setattr(PagedTexts, "chunks", lambda self, device: chunks(self, device))
    monkeypatch.setattr(TensorReader, "__init__", counting)
    stream.states_of(context, streamed, texts, cost, progress=lambda _: None)
    config = read_json(bundle / "main/config.json")
    layers: dict[str, set[str]] = {}
    for name, times in read.items():
        assert times == 1 or "embed" in name, f"{name} is read {times} times"
        layer, expert, rest = name.partition(".mlp.experts.")
        if expert:
            layers.setdefault(layer, set()).add(rest.split(".")[0])
    k, experts = config["num_experts_per_tok"], config["n_routed_experts"]
    sparse = config["num_hidden_layers"] - config["first_k_dense_replace"]
    assert len(layers) == sparse
    assert all(k <= len(picked) <= min(4 * k, experts) for picked in layers.values())
    assert sum(map(len, layers.values())) < sparse * experts, "every expert is read"


READING = stream_cost.Rates(bytes_per_second=1e6, expand=3e-9, multiply=2e-10)
COMPUTING = stream_cost.Rates(bytes_per_second=1e9, expand=3e-8, multiply=2e-8)


@pytest.mark.parametrize(
    ("texts", "rates", "figures"),
    [
        ((6, 4, 9), READING, [111661628, 3165972, 524288, 1629440, 32.778221929188085]),
        ((700,), COMPUTING, [112064508, 3166804, 524288, 60032000, 1582.248399008]),
    ],
)
def test_the_figures_of_a_cost(
    texts: tuple[int, ...],
    rates: stream_cost.Rates,
    figures: list[float],
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes, memory and seconds of a machine of known speed, for texts of so many tokens."""
    prompts = tmp_path / "texts.jsonl"
    lines = [json.dumps({"prompt_token_ids": [*range(5, 5 + size)]}) for size in texts]
    prompts.write_text("\n".join(lines))
    context = context_of(bundle, prompts, tmp_path)
    real = stream_cost.probed
    monkeypatch.setattr(stream_cost, "probed", lambda *given: (rates, real(*given)[1]))
    cost = stream_cost.cost_of(context, open_streamed(bundle, "cpu"), stream.texts_of(context)[0])
    bytes_held = cost.weight_bytes, cost.dense_bytes, cost.activation_bytes
    assert [cost.read_bytes, *bytes_held, cost.seconds] == pytest.approx(figures)
    assert (cost.tokens, cost.bytes_per_second) == (sum(texts), rates.bytes_per_second)


def test_a_few_layers_are_held_at_a_time_and_an_interrupted_run_resumes(
    bundle: Path,
    engine: tuple[Path, list[float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No layer but the one before it is alive when a layer is read; the run is interrupted at layer
    40."""
    read: list[int] = []
    real = StreamedModel.layer
    handed_out: list[weakref.ref[DecoderLayer]] = []
    alive: list[int] = []

    def layer(self: StreamedModel, index: int) -> DecoderLayer:
        if index == 40 and 40 not in read:
            read.append(index)
            raise KeyboardInterrupt
        alive.append(sum(layer() is not None for layer in handed_out))
        read.append(index)
        found = real(self, index)
        handed_out.append(weakref.ref(found))
        return found

    monkeypatch.setattr(StreamedModel, "layer", layer)
    prompts, wanted = engine
    with pytest.raises(KeyboardInterrupt):
        list(stream.run(context_of(bundle, prompts, tmp_path)))
    assert read == [60, *range(40), 40] and len(list(tmp_path.iterdir())) == 1
    read[:] = [40]
    items = list(stream.run(context_of(bundle, prompts, tmp_path)))
    assert read == [40, 60, *range(40, 61)], "layers that were done are not read again"
    assert in_blocks(items) == wanted
    assert max(alive) <= 1, "a layer outlives its turn"


def test_other_texts_do_not_resume(
    bundle: Path, engine: tuple[Path, list[float]], tmp_path: Path
) -> None:
    context = context_of(bundle, engine[0], tmp_path)
    texts = Texts((Text((1, 2, 3), 1),))
    other = Texts((Text((1, 2, 4), 1),))
    assert stream._identity(context, texts) != stream._identity(context, other)


def test_passes_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    """The first to end leaves the other's state; a folder that was left is taken again."""
    with pass_folder(tmp_path, "a") as first:
        (first / STATE_NAME).write_text("first")
        with pass_folder(tmp_path, "a") as second, pass_folder(tmp_path, "b") as other:
            assert len({first, second, other}) == 3
            (second / STATE_NAME).write_text("second")
        assert [*tmp_path.iterdir()] == [first]
        assert (first / STATE_NAME).read_text() == "first"
    assert not [*tmp_path.iterdir()]
    with pytest.raises(KeyboardInterrupt), pass_folder(tmp_path, "a") as first:
        (first / STATE_NAME).write_text("left")
        raise KeyboardInterrupt
    with pass_folder(tmp_path, "a") as again:
        assert (again / STATE_NAME).read_text() == "left"


def test_a_folder_that_was_removed_meanwhile_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last user removes it between the opening of its lock and the locking."""
    real, (folder,) = fcntl.flock, [tmp_path / "mtp-export-stream-a-0"]

    def removed_first(lock: int, kind: int) -> None:
        if (folder / "lock").exists():
            shutil.rmtree(folder)
        real(lock, kind)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with pass_folder(tmp_path, "a") as taken:
        assert taken.name == "mtp-export-stream-a-1"


def full(*given: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "state.pt")


def vanishing(self: StreamedModel, first: int) -> Iterator[DecoderLayer]:
    for index in range(first, self.config.layers):
        if index == 1:
            shutil.rmtree(self.opened.folder.parents[1] / "state")
        yield self.layer(index)


@pytest.mark.parametrize(
    ("owner", "name", "trouble"),
    [
        (os, "fsync", full),
        (os, "pwrite", full),
        (Path, "mkdir", lambda *given, **more: full()),
        (fcntl, "flock", full),
        (StreamedModel, "layers", vanishing),
    ],
)
def test_trouble_with_the_workdir_is_no_verdict(
    owner: Any,
    name: str,
    trouble: Callable[..., Any],
    pristine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk that fills up, and a folder that vanishes, end the command with another exit code."""
    bundle, texts, state = (tmp_path / name for name in ("bundle", "texts.jsonl", "state"))
    assert export(pristine, bundle, "--quiet").code == 0
    texts.write_text(json.dumps({"prompt_token_ids": [*range(9)]}))
    monkeypatch.setattr(owner, name, trouble)
    options = ("--stream", "--prompts", texts, "--workdir", state, "--quiet")
    outcome = run_program("verify", bundle, *options)
    assert outcome.code == 6, outcome.err
    assert "cannot keep its state" in outcome.err and "ship" not in outcome.err


def test_a_workdir_in_the_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    for source, workdir in ((None, bundle / "main"), (tmp_path, tmp_path / "w")):
        with pytest.raises(UsageError, match="--workdir"):
            Context.open(VerifyOptions(bundle, source, workdir=workdir), no_progress)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:-2000],
        lambda raw: bytes(len(raw)),
        lambda raw: b"years of work",
        lambda raw: _state({"layer": 1}),
        lambda raw: _state({"layer": 1, "hidden": 5}),
        lambda raw: _state({"layer": 1, "hidden": torch.zeros(3, 3)}),
    ],
)
def test_a_damaged_state_is_not_resumed(
    damage: Callable[[bytes], bytes],
    pristine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle, texts = tmp_path / "bundle", tmp_path / "texts.jsonl"
    assert export(pristine, bundle, "--quiet").code == 0
    texts.write_text(json.dumps({"prompt_token_ids": [*range(9)]}))
    context = context_of(bundle, texts, tmp_path / "state")
    streamed, (given, _) = open_streamed(bundle, "cpu"), stream.texts_of(context)
    cost = stream_cost.cost_of(context, streamed, given)
    states = partial(stream.states_of, context, streamed, given, cost, progress=lambda _: None)
    whole = states()
    with monkeypatch.context() as patch:
        patch.setattr(StreamedModel, "layer", _stop_at(2))
        with pytest.raises(KeyboardInterrupt):
            states()
    (state,) = (tmp_path / "state").glob("*/state.pt")
    state.write_bytes(damage(state.read_bytes()))
    assert torch.equal(states(), whole)


def _state(content: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def _stop_at(index: int) -> Callable[[StreamedModel, int], DecoderLayer]:
    real = StreamedModel.layer

    def layer(self: StreamedModel, wanted: int) -> DecoderLayer:
        if wanted == index:
            raise KeyboardInterrupt
        return real(self, wanted)

    return layer

"""Models divided over ranks: the bits of one process, what each rank reads and holds, and the
collectives of a pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cases import nightly_but
from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_kernels.cpu.panel_forms import PANEL
from mtp_runtime.cache import CachedSequence, PageAllocator, lay_out
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import TargetDraft
from mtp_runtime.drafters.eagle3 import read_eagle3
from mtp_runtime.drafters.parallel_heads import read_parallel_heads
from mtp_runtime.loading.ledger import Ledger
from mtp_runtime.loading.same_files import SAMPLE_BYTES
from mtp_runtime.models import load
from mtp_runtime.models.eagle3 import Eagle3Module
from mtp_runtime.models.load import Loaded, LoadOptions, load_model, open_model
from mtp_runtime.models.model import Model
from mtp_runtime.parallel.group import Group, Split
from mtp_runtime.sampling import SamplingParams
from runtime.checkpoints import DIVIDED, SMALL_CONFIGS, YARN, write_checkpoint
from runtime.drafts import ffn_layout, write_eagle3, write_heads, write_layer_heads
from runtime.harness import Prompt, Walk, prompts_of, run
from runtime.ranks import bytes_read, dense_bytes, draft_bytes, of_each, packed_bytes, ranks

GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.8, seed=3)
DEFAULTS = LoadOptions()
UNEVEN = {"num_attention_heads": 5, "num_key_value_heads": 5}
EVERY_PUSH = ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"]
MODEL_TYPES = (*EVERY_PUSH, "mimo", "hy_v3", "qwen3_moe")


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.nightly)], ids="{} ranks".format
)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    with ranks(request.param) as group:
        yield group


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads, experts and widths that do not divide evenly."""
    config = SMALL_CONFIGS["deepseek_v3"] | UNEVEN | {"rope_scaling": YARN}
    return write_checkpoint(tmp_path_factory.mktemp("uneven"), config)


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Loaded:
    return load_model(checkpoint, LoadOptions())


@cache
def part_of(group: Group, folder: Path, options: LoadOptions = DEFAULTS) -> Loaded:
    """A rank's part of a model."""
    return load_model(folder, options, group)


def states(model: Model, tokens: tuple[int, ...]) -> list[torch.Tensor]:
    """Logits and hidden states, of a prompt in two chunks and a token after it."""
    walk = Walk(model)
    cuts = [0, len(tokens) // 2, len(tokens) - 1, len(tokens)]
    return [tensor for a, b in pairwise(cuts) for tensor in walk.feed(tokens[a:b])]


def divided_states(
    group: Group, folder: Path, tokens: tuple[int, ...], options: LoadOptions = DEFAULTS
) -> list[torch.Tensor]:
    return states(part_of(group, folder, options).model, tokens)


def assert_equal_bits(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other), float((one - other).abs().max())


def test_hidden_states_and_logits_have_the_bits_of_one_process(
    group: Group, checkpoint: Path, whole: Loaded
) -> None:
    (tokens,) = prompts_of([37], 96)
    found = group.everywhere(divided_states, checkpoint, tokens)
    assert_equal_bits(found, states(whole.model, tokens))
    assert group.everywhere(ledger_of, checkpoint) == whole.ledger


def ledger_of(group: Group, folder: Path) -> Ledger:
    return part_of(group, folder).ledger


def test_every_rank_has_the_same_bits(group: Group, checkpoint: Path) -> None:
    first, *others = of_each(group, state_numbers, checkpoint, prompts_of([37], 96)[0])
    assert others == [first] * (group.size - 1)


def state_numbers(group: Group, folder: Path, tokens: tuple[int, ...]) -> list[float]:
    found = divided_states(group, folder, tokens)
    return [number for tensor in found for number in tensor.flatten().tolist()]


def test_the_best_tokens_are_those_of_one_process(
    group: Group, checkpoint: Path, whole: Loaded
) -> None:
    """Of equal logits the first one's, on whatever ranks they are; and no logits are gathered."""
    rows = torch.randn(40, 48, generator=torch.Generator().manual_seed(9))
    rows[3] = 0.0
    best = group.everywhere(best_of, checkpoint, rows)
    assert torch.equal(best, whole.model.head.best(rows))
    assert best[3] == 0
    logits = whole.model.head.logits(rows)
    assert torch.equal(best, logits.argmax(dim=-1))
    assert {int(token) * group.size // 96 for token in logits.argmax(dim=-1)} == set(
        range(group.size)
    ), "every rank has some"


def best_of(group: Group, folder: Path, rows: torch.Tensor) -> torch.Tensor:
    return part_of(group, folder).model.head.best(rows)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["none", "mtp", "inference_with_reference", "draft_model"])
def test_tokens_and_drafts_are_those_of_one_process(
    group: Group, checkpoint: Path, whole: Loaded, name: str, params: SamplingParams
) -> None:
    prompts = [prompt * 2 for prompt in prompts_of([1, 15, 16, 17, 5], 96)]
    alone = run(whole.model, prompts, params, method=name, k=3, draft_model=whole.model)
    accepted = [alone.counts("accepted", at) for at in range(3)]
    wanted = [*map(float, chain.from_iterable(alone.outputs)), *accepted]
    assert of_each(group, divided_run, checkpoint, prompts, params, name) == [wanted] * group.size


def divided_run(
    group: Group, folder: Path, prompts: list[Prompt], params: SamplingParams, method: str
) -> list[int]:
    model = part_of(group, folder).model
    done = run(model, prompts, params, method=method, k=3, draft_model=model)
    return [*chain.from_iterable(done.outputs), *(done.counts("accepted", at) for at in range(3))]


Read = Callable[[Path, Loaded], TargetDraft]


@pytest.mark.parametrize("name", ["eagle3", "ffn heads", "layer heads"])
def test_drafts_of_their_own_folders(
    group: Group, checkpoint: Path, whole: Loaded, name: str, tmp_path: Path
) -> None:
    config = SMALL_CONFIGS["deepseek_v3"] | UNEVEN
    read: Read
    if name == "eagle3":
        folder, read = write_eagle3(tmp_path / "draft", config), read_eagle3
    elif name == "ffn heads":
        folder, read = write_heads(tmp_path / "draft", ffn_layout()), read_parallel_heads
    else:
        folder, read = write_layer_heads(tmp_path / "draft", config), read_parallel_heads
    wanted = [*map(float, drafted(whole, folder, read))]
    assert of_each(group, divided_drafts, checkpoint, folder, read) == [wanted] * group.size


def divided_drafts(group: Group, checkpoint: Path, folder: Path, read: Read) -> list[int]:
    return drafted(part_of(group, checkpoint), folder, read)


def drafted(loaded: Loaded, folder: Path, read: Read) -> list[int]:
    """Tokens of some prompts, and how many of their drafts were accepted."""
    draft = read(folder, loaded)
    model = loaded.model.tapped(draft.taps)
    done = run(model, prompts_of([1, 15, 16, 9], 96), GREEDY, build=draft.build, k=3)
    accepted = [number for request in done.requests for number in request.metrics.accepted]
    return [*chain.from_iterable(done.outputs), *accepted]


@pytest.mark.parametrize("name", ["eagle3", "ffn heads"])
def test_each_rank_reads_and_holds_its_part_of_a_draft(
    group: Group, checkpoint: Path, name: str, tmp_path: Path
) -> None:
    """Most of it are wide matrices. The one whose outputs are divided is held in whole panels of
    them, where it is packed."""
    target, wide = SMALL_CONFIGS["deepseek_v3"] | UNEVEN, 20_000
    unused = -(target["hidden_size"] // group.size) % PANEL
    read: Read
    if name == "eagle3":
        folder, read = tmp_path, read_eagle3
        write_eagle3(folder, target, intermediate_size=wide)
    else:
        folder, read = write_heads(tmp_path, ffn_layout(inner=wide)), read_parallel_heads
    total = (folder / "model.safetensors").stat().st_size
    padding = 4 * wide * unused if name == "eagle3" else 0
    for read_bytes, held in of_each(group, cost_of_draft, checkpoint, folder, read):
        assert read_bytes == pytest.approx(total / group.size, rel=0.05)
        assert held == pytest.approx(total / group.size + padding, rel=0.05)


def cost_of_draft(group: Group, checkpoint: Path, folder: Path, read: Read) -> list[int]:
    loaded = part_of(group, checkpoint)
    before = bytes_read()
    draft = read(folder, loaded)
    return [bytes_read() - before, draft_bytes(draft.weights)]


def test_an_eagle3_draft_has_the_bits_of_one_process(
    group: Group, checkpoint: Path, whole: Loaded, tmp_path: Path
) -> None:
    config = SMALL_CONFIGS["deepseek_v3"] | UNEVEN
    folder = write_eagle3(tmp_path, config, fc_norm=True)
    random = torch.Generator().manual_seed(3)
    taps = torch.randn(37, 2 * config["hidden_size"], generator=random)
    found = group.everywhere(divided_eagle3, checkpoint, folder, taps)
    assert_equal_bits(found, eagle3_states(whole, folder, taps))


def divided_eagle3(
    group: Group, checkpoint: Path, folder: Path, taps: torch.Tensor
) -> list[torch.Tensor]:
    return eagle3_states(part_of(group, checkpoint), folder, taps)


def eagle3_states(loaded: Loaded, folder: Path, taps: torch.Tensor) -> list[torch.Tensor]:
    module = read_eagle3(folder, loaded).weights
    assert isinstance(module, Eagle3Module)
    pages, sequence = PageAllocator(4, 16), CachedSequence()
    pages.append(sequence, len(taps))
    layout = lay_out(pages, [sequence], [(0, len(taps))], loaded.model.device)
    hidden, cache = module.combined(taps), module.new_cache(pages)
    x = module(torch.arange(len(taps)), hidden, cache, layout)
    normed = module.head.normed(x)
    return [hidden, x, module.head.logits(normed), module.head.best(normed)]


def test_every_drafter_is_tested_here() -> None:
    assert DRAFTERS.keys() == {
        *("none", "mtp", "eagle", "inference_with_reference", "draft_model"),
        *("eagle3", "parallel_heads"),
        "assistant",  # refused: test_assistant.py
    }


def test_the_trained_model(group: Group, trained: Path, trained_model: Model) -> None:
    """fp8 blocks that ranks cut, 61 layers."""
    (tokens,) = prompts_of([21], 2048)
    found = group.everywhere(divided_states, trained, tokens)
    assert_equal_bits(found, states(trained_model, tokens))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reduced_sums_are_close_and_always_the_same(
    group: Group, checkpoint: Path, dtype: str
) -> None:
    (tokens,) = prompts_of([30], 96)
    wanted = states(load_model(checkpoint, LoadOptions(dtype=dtype)).model, tokens)
    options = LoadOptions(dtype=dtype, parallel_mode="reduce")
    found = group.everywhere(divided_states, checkpoint, tokens, options)
    assert_equal_bits(group.everywhere(divided_states, checkpoint, tokens, options), found)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert not torch.equal(one, other), "nothing was added in another order"


@pytest.mark.parametrize("model_type", nightly_but(EVERY_PUSH, MODEL_TYPES))
def test_every_family_has_the_bits_of_one_process(
    group: Group, model_type: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, divisible(model_type, group))
    (tokens,) = prompts_of([30], 96)
    found = group.everywhere(divided_states, folder, tokens, LoadOptions(deterministic=True))
    assert_equal_bits(found, states(load_model(folder, LoadOptions()).model, tokens))


@pytest.mark.parametrize("mode", ["gather", "reduce"])
@pytest.mark.parametrize("model_type", nightly_but(EVERY_PUSH, (*MODEL_TYPES, "exaone_moe")))
def test_every_family_by_torch(group: Group, model_type: str, mode: str, tmp_path: Path) -> None:
    """With sparse attention where there is an indexer."""
    config = divisible(model_type, group)
    folder = write_checkpoint(tmp_path, config)
    longest = 400 if "index_topk" in config else None
    options = LoadOptions(dequantize_at_load=False, max_model_len=longest, parallel_mode=mode)
    (tokens,) = prompts_of([300 if longest else 30], 96)
    wanted = states(load_model(folder, options).model, tokens)
    found = group.everywhere(divided_states, folder, tokens, options)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def divisible(model_type: str, group: Group) -> dict[str, Any]:
    """A small config with a key head for every rank."""
    config = SMALL_CONFIGS[model_type]
    if config["num_key_value_heads"] >= group.size:
        return config
    return config | {"num_attention_heads": 8, "num_key_value_heads": 4}


def test_every_family_is_tested_here() -> None:
    assert set(MODEL_TYPES) == set(DIVIDED)


def read_by_loading(group: Group, path: Path, options: LoadOptions) -> list[int]:
    before = bytes_read()
    load_model(path, options, group)
    return [bytes_read() - before]


@cache
def _replicated(path: Path) -> int:
    """Bytes of the tensors that every rank reads."""
    parts = ("norm", "q_a_proj", "kv_a_proj", "mlp.gate.", "eh_proj")
    tensors = Checkpoint.open(path).tensors.values()
    return sum(one.size_bytes for one in tensors if any(part in one.name for part in parts))


def test_each_rank_reads_its_part_alone(group: Group, trained: Path, pristine: Path) -> None:
    """A rank's share of what is divided, what all have, and headers and configs."""
    of_each(group, read_by_loading, pristine, LoadOptions())  # reads what compiles its kernels
    total = sum(path.stat().st_size for path in trained.glob("*.safetensors"))
    headers = of_each(group, read_headers, trained)[0][0]
    headers += SAMPLE_BYTES * len(Checkpoint.open(trained).tensors)  # which ranks compare
    for (read,) in of_each(group, read_by_loading, trained, LoadOptions()):
        copies = 2 * 2048 * 128 * 2 * 2 / group.size  # embedding and head are compared with copies
        divided = (total - _replicated(trained)) / group.size
        assert read - headers - copies <= 1.02 * (divided + _replicated(trained))


def read_headers(group: Group, path: Path) -> list[int]:
    before = bytes_read()
    open_model(path, LoadOptions())
    return [bytes_read() - before]


HELD_BY_ALL = ("layernorm", "q_a_proj", "kv_a_proj", "mlp.gate.")


def test_each_rank_holds_its_part_alone(group: Group, trained: Path, trained_model: Model) -> None:
    held = [packed for (_, packed) in of_each(group, held_by_rank, trained)]
    decoder: Any = trained_model.layers
    # The MTP layer's own part is among those of the ranks.
    module: Any = trained_model.mtp_modules[0].layers
    layers = (*decoder.decoder.layers, *module.decoder.layers)
    whole = sum(size_of(layer.arrays) for layer in layers)
    by_all = sum(
        one.size_bytes + 4 * one.shape[0]  # a scale for each row
        if "_proj" in name
        else 4 * math.prod(one.shape)
        for name, one in Checkpoint.open(trained).tensors.items()
        if any(part in name for part in HELD_BY_ALL) and not name.endswith("_scale_inv")
    )
    # Panels of 32 outputs are filled up: an inner size of 64 has too few for four ranks.
    padding = 1.02 if group.size == 2 else 1.1
    assert max(held) <= padding * ((whole - by_all) / group.size + by_all), (held, whole, by_all)


WIDE = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "v_head_dim": 32,
    "vocab_size": 2048,
}


def test_each_rank_holds_its_part_of_whole_panels_alone(group: Group, tmp_path: Path) -> None:
    """Where nothing is filled up, 1 / N of what is divided, with embedding and head, in either
    mode."""
    folder = write_checkpoint(tmp_path, SMALL_CONFIGS["deepseek_v3"] | WIDE)
    sizes = {one.name: one.size_bytes for one in Checkpoint.open(folder).tensors.values()}
    divided = sum(sizes.values()) - _replicated(folder)
    for mode in ("gather", "reduce"):
        for dense, packed in of_each(group, held_by_rank, folder, mode):
            assert 0.98 * divided / group.size < dense + packed
            assert dense + packed <= 1.02 * (divided / group.size + _replicated(folder))


def held_by_rank(group: Group, folder: Path, mode: str = "gather") -> list[int]:
    model = part_of(group, folder, LoadOptions(parallel_mode=mode)).model
    layers = (model.layers, *(module.layers for module in model.mtp_modules))
    head = 4 * math.prod(model.head.linear.weight.shape)  # its local rows, in whole panels
    return [dense_bytes([model.embedding]) + head, sum(map(packed_bytes, layers))]


def size_of(arrays: Iterable[np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays)


def collectives(group: Group, folder: Path, rows: int, options: LoadOptions) -> Counter[str]:
    """Collectives of one pass over some rows."""
    model = part_of(group, folder, options).model
    walk = Walk(model)
    before = group.calls.copy()
    walk.feed(prompts_of([rows], model.config.vocab)[0])
    return group.calls - before


# Of a dense and of a sparse layer, as docs/distributed.md lists them.
PER_LAYER = {
    "gather": ({"columns": 4}, {"columns": 3, "several": 1}),
    "reduce": ({"sum": 2}, {"sum": 2}),
}


@pytest.mark.parametrize("mode", PER_LAYER)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_collectives_of_a_layer(group: Group, tmp_path: Path, mode: str, compiled: bool) -> None:
    """Count those that a further layer of a kind adds to a pass."""
    dense, sparse = PER_LAYER[mode]
    passes = {}
    for kind, layers, first in (("one", 1, 1), ("dense", 2, 2), ("sparse", 2, 1)):
        config = SMALL_CONFIGS["deepseek_v3"] | {
            "num_hidden_layers": layers,
            "first_k_dense_replace": first,
            "num_attention_heads": 4,
        }
        folder = write_checkpoint(tmp_path / kind, config)
        options = LoadOptions(dequantize_at_load=compiled, parallel_mode=mode, with_mtp=False)
        passes[kind] = group.everywhere(collectives, folder, 9, options)
    assert passes["dense"] - passes["one"] == dense
    assert passes["sparse"] - passes["one"] == sparse
    around = passes["one"]
    around.subtract(dense)
    assert +around == {"rows": 1, "columns": 1}, "tokens are embedded, and logits gathered"


def test_more_ranks_than_heads_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path)
    monkeypatch.setattr(load, "require_same_files", lambda *_: None)  # nobody else is there
    with pytest.raises(UnsupportedError, match="more processes than heads"):
        load_model(folder, LoadOptions(), Group(Split(0, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_any_size_arrive(group: Group, dtype: torch.dtype) -> None:
    for shape in ((), (0, 3), (7,), (40, 3), (300, 40)):
        tensor = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        found = group.everywhere(row_of, tensor)
        wanted = [float(tensor.double().sum()), float(tensor.dim()), float(tensor.numel())]
        assert found.tolist() == [wanted] * group.size


def row_of(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    own = [float(tensor.double().sum()), float(tensor.dim()), float(tensor.numel())]
    return group.rows_to_first(torch.tensor([own]).double(), [1] * group.size)


def test_messages_of_any_length_arrive(group: Group) -> None:
    for size in (1, 16_000, 16_376, 17_000, 100_000):
        assert of_each(group, length_of, "x" * size) == [[size]] * group.size


def length_of(group: Group, text: str) -> list[int]:
    return [len(text)]


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_parts_cover_everything_once(size: int) -> None:
    for total in (size, 61, 128, 129280):
        parts = [Split(rank, size).part(total) for rank in range(size)]
        assert [at for part in parts for at in part] == list(range(total))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranks_take_the_smallest_cache(group: Group) -> None:
    """Each has its own room beside what it loaded."""
    assert group.everywhere(smallest_of) == 7


def smallest_of(group: Group) -> int:
    return group.smallest([9, 7, 8, 11][group.rank])

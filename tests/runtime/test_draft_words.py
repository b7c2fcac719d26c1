"""Drafts of their own folders one call at a time: what is read of them, and refusals in full."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtp_checkpoints.errors import MtpExportError, UnsupportedError
from mtp_checkpoints.families.eagle3 import Eagle3Family
from mtp_runtime.acceptance.base import Draft
from mtp_runtime.cache import Cache, PageAllocator
from mtp_runtime.config import EngineConfig, SpeculationConfig
from mtp_runtime.drafters import DRAFTERS
from mtp_runtime.drafters.base import DrafterParts, Pass, TargetDraft
from mtp_runtime.drafters.eagle3 import read_eagle3
from mtp_runtime.drafters.parallel_heads import read_parallel_heads
from mtp_runtime.loading.draft_folder import (
    DraftFolder,
    layout_on_disk,
    part_of,
    read_draft,
    values_of,
    write_tensors,
)
from mtp_runtime.models.eagle3 import (
    Eagle3Module,
    ReducedHead,
    checked_tensors,
    target_tokens,
)
from mtp_runtime.models.load import Loaded, LoadOptions, load_model
from mtp_runtime.models.parallel_heads import FfnHeads, LayerHeads, StoredHeads
from mtp_runtime.request import Request
from mtp_runtime.sampling import SamplingParams
from runtime.checkpoints import SMALL
from runtime.drafts import (
    DRAFT_VOCAB,
    TAPS,
    Tensors,
    ffn_layout,
    save_draft,
    token_offsets,
    write_eagle3,
    write_heads,
    write_layer_heads,
)

VOCAB, HIDDEN = SMALL["vocab_size"], SMALL["hidden_size"]
Reader = Callable[[Path, Loaded], TargetDraft]


@pytest.fixture(scope="module")
def loaded(small: Path) -> Loaded:
    return load_model(small, LoadOptions())


def refusal(action: Callable[[], object]) -> tuple[object, ...]:
    with pytest.raises(MtpExportError) as caught:
        action()
    error = caught.value
    return error.what, error.where, error.expected, error.found, error.todo


def changed(folder: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    return save_draft(folder, json.loads((folder / "config.json").read_text()), tensors)


def with_tokens(folder: Path, tokens: torch.Tensor) -> Path:
    """The draft with these tokens of the target's, and no mask of them."""

    def change(tensors: Tensors) -> None:
        tensors["d2t"] = tokens - torch.arange(len(tokens))
        del tensors["t2d"]

    return changed(folder, change)


TOKENS = torch.arange(VOCAB - DRAFT_VOCAB, VOCAB)


def test_tokens_of_a_reduced_head(loaded: Loaded, tmp_path: Path) -> None:
    """From the target's first to its last, each once."""
    for tokens in (TOKENS, torch.arange(DRAFT_VOCAB)):
        draft = read_eagle3(with_tokens(write_eagle3(tmp_path), tokens), loaded)
        assert isinstance(draft.weights, Eagle3Module)
        head = draft.weights.head
        assert isinstance(head, ReducedHead)
        assert head.tokens.tolist() == tokens.tolist()
        states = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
        logits = head.logits(states)
        assert tuple(logits.shape) == (3, VOCAB)
        others = [token for token in range(VOCAB) if token not in tokens.tolist()]
        assert logits[:, tokens].isfinite().all()
        assert (logits[:, others] == -torch.inf).all()
        assert head.best(states).tolist() == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (TOKENS + 1, f"{VOCAB - DRAFT_VOCAB + 1} to {VOCAB}"),
        (torch.arange(-1, DRAFT_VOCAB - 1), f"-1 to {DRAFT_VOCAB - 2}"),
        (TOKENS.index_fill(0, torch.tensor([7]), int(TOKENS[6])), f"{TOKENS[0]} to {TOKENS[-1]}"),
    ],
    ids=["beyond", "before", "twice"],
)
def test_tokens_that_are_none(
    tokens: torch.Tensor, found: str, loaded: Loaded, tmp_path: Path
) -> None:
    folder = with_tokens(write_eagle3(tmp_path), tokens)
    assert refusal(lambda: read_eagle3(folder, loaded)) == (
        "Tensor d2t of the draft does not name ascending tokens",
        folder,
        f"k + d2t[k] ascending from 0 to {VOCAB - 1}",
        found,
        "It holds offsets, not the tokens themselves: get the draft again",
    )


def test_a_mask_of_other_tokens(loaded: Loaded, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors |= token_offsets(TOKENS, VOCAB)
        tensors["t2d"][0] = True

    folder = changed(write_eagle3(tmp_path), change)
    assert refusal(lambda: read_eagle3(folder, loaded)) == (
        "Tensors d2t and t2d of the draft name different tokens",
        folder,
        f"the {DRAFT_VOCAB + 1} tokens of t2d",
        f"{DRAFT_VOCAB} tokens, the first of them {TOKENS[0]}",
        "One of them is shifted or of another draft: get the draft again",
    )


def test_offsets_name_the_tokens_that_they_were_made_of() -> None:
    tokens = torch.tensor([0, 3, 4, 8])
    made = token_offsets(tokens, 9)
    assert made["d2t"].tolist() == [0, 2, 2, 5]
    assert target_tokens(made["d2t"]).tolist() == tokens.tolist()
    assert (made["t2d"].dtype, made["t2d"].nonzero()[:, 0].tolist()) == (torch.bool, [0, 3, 4, 8])
    assert len(made["t2d"]) == 9


def test_drafts_of_another_target(loaded: Loaded, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "eagle3", target_hidden_size=24)
    assert refusal(lambda: read_eagle3(folder, loaded))[:4] == (
        "The draft was made for another target",
        folder,
        f"vocab_size {VOCAB} and target_hidden_size {HIDDEN}",
        f"{VOCAB} and 24",
    )
    folder = write_heads(tmp_path / "heads", ffn_layout(hidden=24))
    assert refusal(lambda: read_parallel_heads(folder, loaded))[:4] == (
        "The heads were made for another target",
        folder,
        f"hidden states of {HIDDEN} elements",
        24,
    )


def without(folder: Path, *names: str) -> None:
    changed(folder, lambda tensors: [tensors.pop(name, None) for name in names])


def test_tensors_that_are_not_as_promised_are_counted(loaded: Loaded, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "eagle3")
    for name, tail in (("fc.weight", ": missing"), ("norm.weight", ": missing (1 more like this)")):
        without(folder, name)
        what, where, *_ = refusal(lambda: read_eagle3(folder, loaded))
        assert str(what).endswith(tail) and where == folder
    heads = write_layer_heads(tmp_path / "heads")
    for name, tail in (("o_proj", ": missing"), ("kv_b_proj", ": missing (1 more like this)")):
        without(heads, f"extra_heads.1.self_attn.{name}.weight")
        what, where, *_ = refusal(lambda: read_parallel_heads(heads, loaded))
        assert str(what).endswith(tail) and where == "extra_heads.1"


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("eagle3", "Method eagle3 needs an EAGLE-3 draft"),
        ("parallel_heads", "Method parallel_heads needs a draft of heads"),
        ("assistant", "Method assistant needs an assistant of the target"),
    ],
)
def test_a_method_without_its_draft(method: str, what: str, loaded: Loaded) -> None:
    found = refusal(lambda: DRAFTERS[method].build(parts_of(loaded)))
    assert (found[0], found[4]) == (what, "Give its folder as draft_model")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_of_layers(dtype: torch.dtype, loaded: Loaded, tmp_path: Path) -> None:
    """Any that holds weights, and no other."""
    folder = changed(
        write_layer_heads(tmp_path),
        lambda tensors: tensors.update({name: one.to(dtype) for name, one in tensors.items()}),
    )
    if dtype is torch.float64:
        found = refusal(lambda: read_parallel_heads(folder, loaded))
        assert "wrong dtype" in str(found[0])
        assert str(found[2]).startswith("BF16 or F16 or F32 [")
    else:
        assert isinstance(read_parallel_heads(folder, loaded).weights, LayerHeads)


class NotedPages(PageAllocator):
    """Pages that note which caches are filled with NaN."""

    def __init__(self) -> None:
        super().__init__(8, 16)
        self.poisoned: list[Cache] = []

    def poison_freed(self, cache: Cache) -> None:
        super().poison_freed(cache)
        self.poisoned.append(cache)


def parts_of(loaded: Loaded, draft: TargetDraft | None = None, **settings: Any) -> DrafterParts:
    model, pages = loaded.model.tapped(draft.taps if draft else ()), NotedPages()
    config = EngineConfig(
        page_size=16, cache_tokens=128, speculation=SpeculationConfig("mtp"), **settings
    )
    return DrafterParts(model, pages, cache=model.new_cache(pages), config=config)


def read(name: str, loaded: Loaded, folder: Path) -> TargetDraft:
    if name == "eagle3":
        return read_eagle3(write_eagle3(folder), loaded)
    write_layer_heads(folder) if name == "layers" else write_heads(folder, ffn_layout())
    return read_parallel_heads(folder, loaded)


@pytest.mark.parametrize("name", ["eagle3", "layers", "blocks"])
def test_caches_of_drafts_are_poisoned_where_asked(
    name: str, loaded: Loaded, tmp_path: Path
) -> None:
    draft = read(name, loaded, tmp_path)
    for poison_freed in (False, True):
        parts = parts_of(loaded, draft, poison_freed=poison_freed)
        draft.build(parts)
        assert isinstance(parts.pages, NotedPages)
        assert len(parts.pages.poisoned) == (1 if poison_freed and name != "blocks" else 0)
        for cache in parts.pages.poisoned:
            assert all(tensor.isnan().all() for tensor in cache.tensors)


def test_what_is_said_of_a_draft(loaded: Loaded, tmp_path: Path) -> None:
    wanted = {"eagle3": TAPS, "layers": (SMALL["num_hidden_layers"] - 1,), "blocks": ()}
    for name, taps in wanted.items():
        draft = read(name, loaded, tmp_path / name)
        stored = load_file(tmp_path / name / "model.safetensors")
        assert (draft.tensors, draft.taps) == (len(stored), taps)


def test_blocks_draft_for_what_was_observed_last(loaded: Loaded, tmp_path: Path) -> None:
    """As many as are asked for, up to the heads; none without a look at what is held."""
    draft = read("blocks", loaded, tmp_path)
    drafter, heads = draft.build(parts_of(loaded, draft)), draft.weights
    assert isinstance(heads, FfnHeads)
    requests = [Request(number, (1, 2, 3), SamplingParams()) for number in range(3)]
    assert drafter.propose([], []) == []
    assert drafter.propose(requests, [0, 0, 0]) == [Draft((), None)] * 3
    states = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
    drafter.observe([Pass(requests[0], 0, states[:2]), Pass(requests[1], 0, states[2:3])])
    drafter.observe([Pass(requests[0], 2, states[:0]), Pass(requests[2], 0, states[3:])])
    drafter.observe([])
    bodies = heads.bodies(states[1:])
    best = heads.logits(bodies).argmax(dim=-1).T.tolist()
    found = drafter.propose(requests, [3, 1, 5])
    assert [one.tokens for one in found] == [tuple(best[0]), tuple(best[1][:1]), tuple(best[2])]
    assert [one.draft_probs for one in found] == [None] * 3
    drafter.forget(requests[0])
    drafter.forget(requests[0])
    with pytest.raises(KeyError):
        drafter.propose(requests[:1], [1])


def test_parts_of_tensors(tmp_path: Path) -> None:
    """In a file and in memory."""
    matrix = torch.arange(35.0).view(5, 7)
    save_file({"a": matrix, "b": torch.tensor(2.5)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"x": 1}')
    draft = read_draft(tmp_path)
    assert (draft.path, draft.config) == (tmp_path, {"x": 1})
    for stored in (draft.tensors["a"], matrix):
        assert part_of(stored, range(1, 4), range(2, 5)).tolist() == matrix[1:4, 2:5].tolist()
        assert values_of(stored).tolist() == matrix.tolist()
        on_disk = layout_on_disk(stored)
        assert (on_disk.name, on_disk.dtype, on_disk.shape) == ("", "F32", (5, 7))
    scalar = values_of(draft.tensors["b"])
    assert (scalar.shape, float(scalar)) == ((), 2.5)


def test_tensors_are_written_whole(tmp_path: Path) -> None:
    """Also those on their way through a training, and of no order in memory."""
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    tensors = {"b": parameter, "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3).T}
    write_tensors(tmp_path / "model.safetensors", tensors)
    found = load_file(tmp_path / "model.safetensors")
    assert {name: (one.dtype, one.tolist()) for name, one in found.items()} == {
        name: (one.dtype, one.tolist()) for name, one in tensors.items()
    }
    assert len(list(tmp_path.iterdir())) == 1


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("executed",)


def test_a_pickle_is_never_executed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "medusa_lm_head.pt"
    (tmp_path / "config.json").write_text("{}")
    torch.save({"0.0.linear.weight": Harmful()}, path)
    what, where, _, found, todo = refusal(lambda: read_draft(tmp_path))
    assert "executed" not in capfd.readouterr().out
    assert what == "A file of tensors cannot be read, or holds more than tensors"
    assert (where, todo) == (path, "Do not trust this file; get the draft as safetensors")
    assert found and "\n" not in str(found) and len(str(found)) <= 200
    for content in ([1, 2], {"a": 1}, {1: torch.ones(1)}):
        torch.save(content, path)
        assert refusal(lambda: read_draft(tmp_path))[:3] == (
            "A file of heads holds something else",
            path,
            "tensors by name",
        )


def test_a_draft_opened_by_another_process(loaded: Loaded, tmp_path: Path) -> None:
    """It reads the folder itself."""
    write_heads(tmp_path, ffn_layout())
    draft = read_draft(tmp_path)
    again, arguments = draft.__reduce__()
    assert isinstance(again(*arguments), DraftFolder)
    assert again(*arguments) == draft
    assert StoredHeads.of(draft, loaded.model).layout.heads == 3


def test_an_activation_that_is_not_computed(loaded: Loaded, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path, hidden_act="gelu")
    family = Eagle3Family.from_config(read_draft(folder).config)
    assert checked_tensors(read_draft(folder), family)
    with pytest.raises(UnsupportedError, match="hidden_act"):
        read_eagle3(folder, loaded)

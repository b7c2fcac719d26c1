"""ACL graphs: a captured step follows new lengths and new contents of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, build, check
from npu_graphs import Npu

from mtp_kernels.verify_attention import inputs, verify_attention
from mtp_kernels.verify_attention.ascend_graph import CapturedStep
from npu_operator import registered, split

CASE = Case((3, 1, 16), (40, 30, 20), heads=2, latent=512, rope=64, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "npu", Npu, raising=False)
    # Contents are checked on a CPU alone, since that reads them back.
    monkeypatch.setattr(inputs, "check_cached_lengths", lambda *_, **__: None)
    with registered():
        yield


def test_a_replay_attends_with_new_lengths_and_contents() -> None:
    """Two layers, of which the second attends with what the first returned."""
    arguments = split(build(CASE))
    query = arguments["q_latent"]

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        first, _ = verify_attention(**arguments, backend="ascend_npu")
        return verify_attention(**arguments | {"q_latent": first}, backend="ascend_npu")

    step()
    captured = CapturedStep(CASE.q_lens, step)
    for seed, lengths in ((0, CASE.kv_lens), (1, (11, 29, 16)), (2, (40, 1, 19))):
        other = build(replace(CASE, seed=seed))["q_latent"]
        query.copy_(other)
        found = captured.replay(lengths)
        arguments["kv_lens"] = torch.tensor(lengths, dtype=torch.int32)
        expected = step()
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_a_replay_of_one_layer_is_the_reference() -> None:
    arguments = split(build(CASE))
    captured = CapturedStep(
        CASE.q_lens, lambda: verify_attention(**arguments, backend="ascend_npu")
    )
    check(CASE, *captured.replay(CASE.kv_lens))


def test_other_requests_than_were_captured_are_refused() -> None:
    arguments = split(build(CASE))
    captured = CapturedStep(
        CASE.q_lens, lambda: verify_attention(**arguments, backend="ascend_npu")
    )
    for lengths in ((40, 30), (2, 30, 20)):
        with pytest.raises(ValueError, match=r"kv_lens: expected 3, at least \[3, 1, 16\], found"):
            captured.replay(lengths)
    with pytest.raises(ValueError, match=r"q_lens: expected 1 to 16 each, found \[17\]"):
        CapturedStep((17,), lambda: None)


def test_graphs_need_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "npu")
    with pytest.raises(ValueError, match="expected torch.npu, found none: install the extra npu"):
        CapturedStep((1,), lambda: None)

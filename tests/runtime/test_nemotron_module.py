"""Nemotron-3's MTP module against transformers' classes of its layers, put together as vLLM's
nemotron_h_mtp puts them: a projection of normed embeddings and hidden states, attention, experts,
and a last norm. transformers itself has no such module."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import NemotronHForCausalLM
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families import family_of
from mtp_export.verify.evidence.decode import decode
from mtp_runtime.models.layer_types import config_for
from mtp_runtime.sampling import SamplingParams
from runtime.checkpoints import SMALL_CONFIGS, write_checkpoint
from runtime.harness import load, prompts_of
from runtime.oracles import oracle

OF_LAYERS = ("nemotron_h",)  # families whose modules are compared so


class Module:
    """The module as a model of two layers, which is fed what the projection gives."""

    def __init__(self, path: Path, folder: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        kinds = {"num_hidden_layers": 2, "hybrid_override_pattern": "*E"}
        stored = load_file(path / "model.safetensors")
        main = {name: one for name, one in stored.items() if name.startswith(("lm_head", "back"))}
        own = {
            name.replace("mtp.", "backbone."): one
            for name, one in stored.items()
            if name.startswith(("mtp.layers.0.norm", "mtp.layers.0.mixer", "mtp.layers.1."))
        }
        own["backbone.norm_f.weight"] = own.pop("backbone.layers.1.final_layernorm.weight")
        ends = {name: one for name, one in main.items() if ".layers." not in name}
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | kinds))
        save_file(ends | own, folder / "model.safetensors", metadata={"format": "pt"})
        self.layers, info = NemotronHForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        assert not [*info["missing_keys"], *info["unexpected_keys"]]
        self.projection = stored["mtp.layers.0.eh_proj.weight"]
        self.norms = []
        for name in ("enorm", "hnorm"):
            norm = NemotronHRMSNorm(config["hidden_size"], eps=1e-5)
            norm.weight.data = stored[f"mtp.layers.0.{name}.weight"]
            self.norms.append(norm)

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, d] after the last norm, of tokens [T] and hidden states [T, d]."""
        embedded = self.layers.get_input_embeddings()(torch.tensor(tokens))
        both = (norm(one) for norm, one in zip(self.norms, (embedded, hidden), strict=True))
        joined = torch.cat([*both], dim=-1) @ self.projection.T
        out: Any = self.layers.model(inputs_embeds=joined[None]).last_hidden_state[0]
        return out

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], hidden: torch.Tensor, count: int) -> list[int]:
        """Best drafts after tokens [T + 1], each from the one before; hidden [T, d]: the main
        model's states of all but the last token."""
        known, made = [*tokens], []
        for _ in range(count):
            after = self(known[1:], hidden)
            made.append(int(self.layers.lm_head(after[-1]).argmax()))
            known.append(made[-1])
            hidden = torch.cat([hidden, after[-1:]])
        return made


def test_what_no_release_has_is_refused_by_name() -> None:
    family = family_of(SMALL_CONFIGS["nemotron_h"] | {"use_bias": True, "n_shared_experts": 2})
    with pytest.raises(UnsupportedError) as caught:
        config_for(family, None)
    assert "use_bias is True, n_shared_experts is 2" in str(caught.value)


@pytest.mark.parametrize("changes", [{}, {"moe_latent_size": 32}], ids=["plain", "latent"])
def test_drafts_are_those_of_transformers_layers(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run with three drafts a step: every one of them, whatever came before it."""
    path = write_checkpoint(
        tmp_path / "model", SMALL_CONFIGS["nemotron_h"] | {"vocab_size": 4} | changes
    )
    reference, module = oracle(path, monkeypatch), Module(path, tmp_path / "module")
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    decoded = decode(load(path), prompts_of([5, 9], 4), params, method="mtp", k=3)
    compared = 0
    for proposal in decoded.proposals:
        known = decoded.requests[proposal.request].tokens[: proposal.last + 1]
        with torch.inference_mode():
            hidden = reference.model(torch.tensor([known[:-1]])).last_hidden_state[0]
        assert list(proposal.tokens) == module.drafts(known, hidden, len(proposal.tokens))
        compared += len(proposal.tokens)
    assert compared > 10

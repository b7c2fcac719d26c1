"""GPTQ without a list of what is quantized, as vLLM takes it: by the names of the tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mtp_checkpoints.errors import InvalidInputError
from mtp_checkpoints.families import family_of
from mtp_checkpoints.quantization.fusion_rules import EXPERTS
from mtp_checkpoints.quantization.methods.gptq import BLOCKS, GPTQ
from mtp_checkpoints.quantization.native import Config, quantization_of, replaced_quantization


def with_others_names_out(config: Mapping[str, Any], tensors: Collection[str]) -> Config:
    """Return a config.json of GPTQ that leaves out the linears of a draft that vLLM's class has
    other names for: without a list it builds those quantized whose names have that of a module with
    codes in them.

    Raises InvalidInputError for one of them that is stored quantized, and what family_of raises.
    """
    quantization = quantization_of(config)
    if quantization.get(BLOCKS):
        return dict(config)
    family = family_of(config, tensors)
    layers = [module.layer.prefix for module in family.mtp]
    own = [spec.module for spec in family.mtp_tensors.values() if spec.is_linear_or_projection]
    pairs = ((name, family.vllm.name_of(layers, name)) for name in own if EXPERTS not in name)
    others = {name: other for name, other in pairs if family.vllm.entry_of(name) != other}
    if (coded := next((name for name in others if f"{name}.qweight" in tensors), None)) is not None:
        raise InvalidInputError(
            "vLLM looks for the names of quantized linears in its own, and has others for this"
            " draft, so that it builds the draft unquantized",
            expected="an unquantized draft, or parts of both names, as self_attn.q_proj, in"
            f" {BLOCKS}",
            found=f"{coded} in GPTQ, which it calls {others[coded]}",
        )
    projection = [family.vllm.projection] if family.vllm.projection else []
    assert GPTQ.leave_out is not None, "it has patterns of what is left out"
    taken = GPTQ.leave_out(quantization, [*others.values(), *projection])
    return replaced_quantization(config, taken)

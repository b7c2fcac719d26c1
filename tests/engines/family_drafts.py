"""Families whose MTP layers, or main models, vLLM's or SGLang's own classes load on a CPU, some of
them once what needs a GPU is replaced: by the classes that their examples name."""

from __future__ import annotations

from runtime.checkpoints import EXAMPLES

VLLM = {name: one.vllm for name, one in EXAMPLES.items() if one.vllm is not None}
VLLM_MAINS = {name: one.vllm_main for name, one in EXAMPLES.items() if one.vllm_main is not None}
SGLANG = {name: one.sglang for name, one in EXAMPLES.items() if one.sglang is not None}
SGLANG_MAINS = {
    name: one.sglang_main for name, one in EXAMPLES.items() if one.sglang_main is not None
}
RUN = frozenset({"mimo"})  # test_mimo_contract runs the module of these

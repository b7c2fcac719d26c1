"""A device called cuda, in a process of its own, whose tensors lie in main memory; its kernels are
those of the references.

    python tests/cuda_device.py NAME FOLDER...     runs a function of SCENES; prints JSON
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from cases import run_program
from memory_device import Device, DeviceTensor, Numbers, on_host
from mtp_kernels import quantize, stored_linear, verify_attention
from mtp_kernels.quantize import reference as quantize_reference
from mtp_kernels.stored_linear import reference as linear_reference
from mtp_kernels.verify_attention import torch_cpu
from mtp_kernels.verify_attention.inputs import Inputs, Sizes
from mtp_runtime import LLM, SamplingParams
from mtp_runtime.static_graph import options as graph_options
from runtime.test_static_graph import RecordedGraphs


def lowered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel of the device: all of its tensors must be there, and so are its results."""

    def call(*args: Any) -> Any:
        found: list[torch.Tensor] = []
        given = [_fields_on_host(value, found) for value in args]
        assert all(isinstance(tensor, DeviceTensor) for tensor in found), function
        made = function(*given)
        return tree_map(lambda v: DeviceTensor(v, "cuda") if torch.is_tensor(v) else v, made)

    return call


def _fields_on_host(value: Any, found: list[torch.Tensor]) -> Any:
    if not is_dataclass(value):
        return tree_map(lambda one: on_host(one, found), value)
    moved = {each.name: on_host(getattr(value, each.name), found) for each in fields(value)}
    return replace(value, **moved)  # type: ignore[type-var]


def module_of(name: str, **functions: Any) -> str:
    """Make a module of a backend; returns its name."""
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(functions)
    return name


def attend(inputs: Inputs, buffer: torch.Tensor, parts: Any, *outputs: torch.Tensor) -> None:
    found: list[torch.Tensor] = []
    own, into = _fields_on_host(inputs, found), [on_host(one, found) for one in outputs]
    assert all(isinstance(tensor, DeviceTensor) for tensor in (*found, buffer))
    torch_cpu.attend(own, on_host(buffer, []), parts, *into)


def workspace_bytes(sizes: Sizes, parts: int | None, device: torch.device) -> int:
    assert device.type == "cuda"
    return torch_cpu.workspace_bytes(sizes, parts, torch.device("cpu"))


@contextmanager
def gpu() -> Iterator[None]:
    """Let this process have the device, in every thread."""
    names = [name for name in vars(quantize_reference) if not name.startswith("_")]
    rows = {n: lowered(vars(quantize_reference)[n]) for n in names if "quantize" in n}
    quantize.BACKENDS["triton_cuda"] = module_of("on_quantize", supports=_is_there, **rows)
    stored_linear.BACKENDS["triton_cuda"] = module_of(
        "on_products",
        supports=lambda x, weight: True,
        linear=lowered(linear_reference.linear),
        grouped_linear=lowered(linear_reference.grouped_linear),
    )
    verify_attention.BACKENDS["triton_cuda"] = module_of(
        "on_attention", attend=attend, workspace_bytes=workspace_bytes
    )
    functions: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "_lazy_init": lambda: None, "synchronize": lambda device=None: None,
        "memory_allocated": lambda device=None: 1 << 20,
    }  # fmt: skip
    vars(torch.cuda).update(functions)
    graph_options.CudaGraphs = lambda device: RecordedGraphs()  # type: ignore[assignment,misc]
    run_thread = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with Device("cuda"), Numbers():
            run_thread(thread)

    threading.Thread.run = run  # type: ignore[method-assign]
    with Device("cuda"), Numbers():
        yield


def _is_there(device: torch.device) -> bool:
    return device.type == "cuda"


PROMPTS = [tuple(range(2, 30)), (5, 9, 4)]
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=4, temperature=0.8, top_p=0.9, seed=3, min_tokens=3, logprobs=2, prompt_logprobs=1
)


def decoding(checkpoint: str, drafts: str, *names: str) -> dict[str, Any]:
    """Decode in ways on the device; returns the greedy tokens of each, and the CPU's."""
    ways: dict[str, dict[str, Any]] = {
        "mtp": {"speculate_method": "mtp", "speculate_max_draft_token_num": 2},
        "bfloat16": {"speculate_method": "mtp", "dtype": "bfloat16"},
        "dense": {"dequantize_at_load": True},
        "graphs": {"static_graph": True, "speculate_method": "mtp"},
        "prefixes": {"prefix_cache": True, "speculate_method": "mtp"},
        "stops": {"speculate_method": "mtp", "draft_stop_entropy": 3.0},
        "relaxed": {"speculate_method": "mtp", "acceptance": "relaxed"},
        "window": {"speculate_method": "mtp", "acceptance": "topp_window"},
        "reference": {"speculate_method": "inference_with_reference"},
        "model": {"speculate_method": "draft_model", "draft_model": checkpoint},
        "eagle3": {"speculate_method": "eagle3", "draft_model": f"{drafts}/eagle3"},
        "heads": {"speculate_method": "parallel_heads", "draft_model": f"{drafts}/heads"},
        "layers": {"speculate_method": "parallel_heads", "draft_model": f"{drafts}/layers"},
    }
    tokens = {"cpu": _tokens(checkpoint, "cpu", {})}
    with gpu():
        for name in names or ways:
            tokens[name] = _tokens(checkpoint, "cuda", ways[name])
    return tokens


def _tokens(checkpoint: str, device: str, way: dict[str, Any]) -> Any:
    llm = LLM(checkpoint, device=device, cache_tokens=512, page_size=16, **way)
    assert {tensor.device.type for tensor in llm.engine.cache.tensors} == {device}
    outputs = [llm.generate(PROMPTS, params) for params in (GREEDY, SAMPLED)]
    return [output.token_ids for output in outputs[0]]


def program(*arguments: str) -> Any:
    """A command; prints its exit code and what it wrote."""
    with gpu():
        done = run_program(*arguments)
    return {"code": done.code, "out": done.out, "err": done.err[-3000:]}


SCENES: dict[str, Callable[..., Any]] = {"program": program, "decoding": decoding}

if __name__ == "__main__":
    print(json.dumps(SCENES[sys.argv[1]](*sys.argv[2:])))

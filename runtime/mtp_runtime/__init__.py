"""Reference runtime: decodes exported bundles, with and without speculation.

What it exports is imported on first use, so that reading a registry of it needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtp_runtime.config import LLMOptions
    from mtp_runtime.llm import LLM, RequestOutput
    from mtp_runtime.request import RequestMetrics, TokenEvent
    from mtp_runtime.sampling import SamplingParams
    from mtp_runtime.summary import Summary, summarise
else:
    _MODULES = {
        "LLM": "llm",
        "LLMOptions": "config",
        "RequestMetrics": "request",
        "RequestOutput": "llm",
        "SamplingParams": "sampling",
        "Summary": "summary",
        "TokenEvent": "request",
        "summarise": "summary",
    }

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = [
    "LLM",
    "LLMOptions",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Summary",
    "TokenEvent",
    "summarise",
]

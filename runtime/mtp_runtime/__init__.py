"""Reference runtime: decodes exported bundles, with and without speculation."""

from mtp_runtime.llm import LLM, RequestOutput
from mtp_runtime.request import RequestMetrics, TokenEvent
from mtp_runtime.sampling import SamplingParams
from mtp_runtime.summary import Summary, summarise

__all__ = [
    "LLM",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Summary",
    "TokenEvent",
    "summarise",
]

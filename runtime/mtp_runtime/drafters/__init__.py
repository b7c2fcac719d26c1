"""Drafters by method name, as PaddleNLP names those that it has. A new one is one file and one line
here."""

from __future__ import annotations

from mtp_runtime.config import NO_DRAFTS
from mtp_runtime.drafters.base import DrafterType
from mtp_runtime.drafters.draft_model import ModelDrafter
from mtp_runtime.drafters.eagle3 import Eagle3Drafter, read_eagle3
from mtp_runtime.drafters.mtp import MtpDrafter
from mtp_runtime.drafters.ngram import NgramDrafter
from mtp_runtime.drafters.none import NoDrafter
from mtp_runtime.drafters.parallel_heads import ParallelHeadsDrafter, read_parallel_heads

DRAFTERS: dict[str, DrafterType] = {
    NO_DRAFTS: DrafterType(NoDrafter, prefix_cache=True, draws=False),
    "mtp": DrafterType(MtpDrafter, needs_mtp=True, prefix_cache=True),
    # Of a DeepSeek model EAGLE's draft is the MTP module under other names.
    "eagle": DrafterType(MtpDrafter, needs_mtp=True, prefix_cache=True),
    "inference_with_reference": DrafterType(NgramDrafter, prefix_cache=True, draws=False),
    "draft_model": DrafterType(ModelDrafter, needs_draft_model=True),
    "eagle3": DrafterType(Eagle3Drafter, read=read_eagle3, prefix_cache=True),
    "parallel_heads": DrafterType(
        ParallelHeadsDrafter, read=read_parallel_heads, prefix_cache=True
    ),
}

"""Drafters by method name, as PaddleNLP names them. A new one is one file and one line here."""

from __future__ import annotations

from mtp_runtime.config import NO_DRAFTS
from mtp_runtime.drafters.base import DrafterType
from mtp_runtime.drafters.draft_model import ModelDrafter
from mtp_runtime.drafters.mtp import MtpDrafter
from mtp_runtime.drafters.ngram import NgramDrafter
from mtp_runtime.drafters.none import NoDrafter

DRAFTERS: dict[str, DrafterType] = {
    NO_DRAFTS: DrafterType(NoDrafter, prefix_cache=True),
    "mtp": DrafterType(MtpDrafter, needs_mtp=True, prefix_cache=True),
    "inference_with_reference": DrafterType(NgramDrafter, prefix_cache=True),
    "draft_model": DrafterType(ModelDrafter, needs_draft_model=True),
}

"""Drafters by method name, as PaddleNLP names them. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable

from mtp_runtime.drafters.base import Drafter, DrafterParts
from mtp_runtime.drafters.draft_model import ModelDrafter
from mtp_runtime.drafters.mtp import MtpDrafter
from mtp_runtime.drafters.ngram import ReferenceDrafter
from mtp_runtime.drafters.none import NoDrafter

DRAFTERS: dict[str, Callable[[DrafterParts], Drafter]] = {
    "none": NoDrafter.build,
    "mtp": MtpDrafter.build,
    "inference_with_reference": ReferenceDrafter.build,
    "draft_model": ModelDrafter.build,
}

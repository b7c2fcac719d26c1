"""Room for the model in this machine's memory, and within a limit of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_checkpoints.errors import MtpExportError, ResourceError
from mtp_export.progress import format_bytes
from mtp_export.verify.options import VerifyOptions

if TYPE_CHECKING:
    from mtp_runtime.models.load import LoadOptions


@dataclass(frozen=True)
class MemoryRoom:
    """Why there is too little memory for the model, None if there is enough; and the bytes of it
    for routed experts, None where all of them are loaded."""

    why_too_little: str | None = None
    expert_bytes: int | None = None

    @property
    def why_one_model(self) -> str | None:
        """The reason why no second model is loaded beside the usual one, None if it may be."""
        if self.expert_bytes is None:
            return None
        return "--max-memory has room for one model, of which experts are read from disk"

    def why_not_beside(self, folder: Path, options: LoadOptions) -> str | None:
        """The reason why the model is not loaded with other options too, None if it may be."""
        return self.why_one_model or why_too_large(folder, options)


def memory_room(folder: Path, mtp_folder: Path | None, asked: VerifyOptions) -> MemoryRoom:
    """Compare what the model takes in float32 with this machine, and with the limit that is asked
    for. There is room for one that cannot be opened: what loads it says why."""
    from mtp_runtime.config import LLMOptions
    from mtp_runtime.models.load import LoadOptions, open_model
    from mtp_runtime.run_plan import within_limit

    options = LoadOptions(mtp_folder=mtp_folder)
    if asked.max_memory is not None and asked.device == "cpu":
        try:
            plan = open_model(folder, options, packs=options.compiled).memory_plan(options)
            plan = within_limit(plan, LLMOptions(max_memory_bytes=asked.max_memory))
        except ResourceError as refusal:
            return MemoryRoom(f"{refusal.found}, and the model takes {refusal.expected}")
        except MtpExportError:
            return MemoryRoom()
        if plan.slots is not None:
            options = replace(options, expert_bytes=plan.slot_bytes)
    reason = why_too_large(folder, options)
    if reason is not None:
        reason += ": use verify --stream, or --max-memory with room for the experts that are used"
    return MemoryRoom(reason, options.expert_bytes)


def why_too_large(folder: Path, options: LoadOptions) -> str | None:
    """The reason why a model does not fit into the memory that is free, None if it does, or if it
    cannot be opened: what loads it says why."""
    from mtp_runtime.models.load import open_model

    try:
        plan = open_model(folder, options, packs=options.compiled).memory_plan(options)
    except MtpExportError:
        return None
    shortage = plan.shortage(0)
    if shortage is None:
        return None
    return (
        f"the weights take {format_bytes(plan.weight_bytes)} in {plan.dtype_name} and"
        f" {format_bytes(shortage[1])} of memory are free"
    )

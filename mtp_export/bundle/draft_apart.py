"""Draft of a model in a checkpoint of its own, such as Gemma-4's assistants: in a bundle it is a
folder beside main/, with a config.json of its own by which engines build it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from mtp_checkpoints.errors import UnsupportedError
from mtp_checkpoints.families import SEPARATE_DRAFTS
from mtp_checkpoints.families.gemma4_assistant import AssistantSpec
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.quantization.method import Dialect
from mtp_checkpoints.quantization.native import with_quantization
from mtp_checkpoints.quantization.stored import StoredModel, stored_source
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.split import SplitOptions, main_part
from mtp_export.bundle.tuning import under_method
from mtp_export.plan import OutputShard, PartPlan
from mtp_export.schemes.configs import quantization_configs
from mtp_export.schemes.conversion import Conversion
from mtp_runtime.drafters import draft_folders


def is_draft(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is a draft, which has no main model."""
    return checkpoint.config.get("model_type") in SEPARATE_DRAFTS


@dataclass(frozen=True)
class DraftApart:
    """A checkpoint that is a draft, and what it holds; spec is its description."""

    checkpoint: Checkpoint
    stored: StoredModel
    spec: AssistantSpec

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Describe a checkpoint that is a draft.

        Raises UnsupportedError for one that a scheme did not write, InvalidInputError for tensors
        that config.json does not imply.
        """
        stored = stored_source(checkpoint.config, checkpoint.tensors)
        if stored.scheme is None:
            raise UnsupportedError(
                "This draft is in a precision that no scheme writes",
                where=checkpoint.path,
                expected="unquantized weights, or fp8",
                found=f"{stored.unkept} linears",
                todo="Start from the original release",
            )
        if problems := stored.differences(checkpoint.tensors):
            problems[0].raise_as_error(checkpoint.path, len(problems) - 1)
        assert isinstance(stored.family, AssistantSpec), "SEPARATE_DRAFTS has no others"
        return cls(checkpoint, stored, stored.family)

    @classmethod
    def in_bundle(cls, checkpoint: Checkpoint, target: ModelSpec) -> Self | None:
        """Return the draft that lies beside the main part that a bundle was opened for; None for a
        target whose drafts are its own (raises as of)."""
        bundle = checkpoint.main_bundle
        if not target.drafts_apart or bundle is None:
            return None
        folder = draft_folders(bundle)[target.draft_method]
        draft = cls.of(Checkpoint.open(folder))
        draft.check_target(target)
        return draft

    def check_target(self, target: ModelSpec) -> None:
        """Refuse a draft of another target (InvalidInputError)."""
        facts = target.facts
        self.spec.check_target(facts.vocab, facts.hidden, target.parts, self.checkpoint.path)

    @property
    def beside(self) -> Checkpoint:
        """The checkpoint with names that no tensor of its target has."""
        return under_method(self.checkpoint, self.spec.draft_method)

    def part(self, split: SplitOptions, conversion: Conversion, dialect: Dialect) -> PartPlan:
        """Return the plan of its folder, in a conversion that its own config.json describes."""
        own = quantization_configs(self.stored, conversion, conversion, dialect).main
        config = with_quantization(self.checkpoint.config, own)
        options = replace(split, main=conversion, main_config=config, gguf=None)
        part = main_part(self.checkpoint, self.stored, options, {})
        method = self.spec.draft_method
        shards = tuple(_reading(method, shard) for shard in part.shards)
        return replace(part, name=method, shards=shards, files=self.checkpoint.files)


def _reading(method: str, shard: OutputShard) -> OutputShard:
    """Return a shard whose steps read tensors by the names that they have beside a target."""
    steps = (
        step._replace(inputs=tuple(f"{method}.{name}" for name in step.inputs))
        for step in shard.steps
    )
    return replace(shard, steps=tuple(steps))

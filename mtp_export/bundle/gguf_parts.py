"""Parts of a bundle as GGUF files: the steps of a plan as llama.cpp has the tensors, the keys, and
the shards, none of which divides a merged tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

from mtp_checkpoints.containers.gguf_architectures import ARCHITECTURE_OF
from mtp_checkpoints.containers.gguf_architectures.base import Architecture, halves_of
from mtp_checkpoints.containers.gguf_forms import Form
from mtp_checkpoints.containers.gguf_values import Value, text, u32
from mtp_checkpoints.containers.gguf_vocabulary import vocabulary_keys
from mtp_checkpoints.containers.gguf_writing import GgufFiles
from mtp_checkpoints.dtypes import DType, OutputTensor
from mtp_checkpoints.errors import UnsupportedError, UsageError
from mtp_checkpoints.families.base import Role
from mtp_checkpoints.families.parts.mla import Mla
from mtp_checkpoints.families.parts.sparse_mla import SparseMla
from mtp_checkpoints.families.spec import ModelSpec
from mtp_checkpoints.formats import UNQUANTIZED, WeightFormat
from mtp_checkpoints.layouts.base import Target
from mtp_checkpoints.quantization.stored import StoredModel
from mtp_checkpoints.tensors.bundle_folder import MAIN, MTP
from mtp_checkpoints.tensors.model_identity import unknown_identity
from mtp_checkpoints.tensors.reader import Checkpoint
from mtp_export.bundle.options import ContentOptions, Part
from mtp_export.bundle.tensor_types import OF_SCHEMES, TensorTypes, is_matrix, refuse_codes
from mtp_export.plan import COPY, OutputShard, PartPlan, Step, pack_together
from mtp_export.schemes.gguf_forms import Reform
from mtp_export.schemes.gguf_transforms import SplitLatentUp, Widen
from mtp_export.schemes.transforms import Convert
from mtp_kernels.sizes import LatentSizes

_QUANTIZATION_VERSION = 2  # of ggml's blocks
_FILE_TYPES = {
    DType.F32: 0,
    DType.F16: 1,
    DType.GGML_Q4_0: 2,
    DType.GGML_Q4_1: 3,
    DType.GGML_Q8_0: 7,
    DType.GGML_Q5_0: 8,
    DType.GGML_Q5_1: 9,
    DType.GGML_Q4_K: 14,
    DType.GGML_Q5_K: 16,
    DType.GGML_Q6_K: 18,
    DType.BF16: 32,
    DType.GGML_MXFP4: 38,
}
_GUESSED = 1024  # a file type of none of these
# llama.cpp computes with these in float32 alone, as with every vector.
_WIDE = (Role.ROUTER, Role.INDEXER_HEADS)


@dataclass(frozen=True)
class GgufParts:
    """Name and vocabulary of a bundle's GGUF files, and the size above which they are split.

    main are the files of a main model that stay as they are; without them it is written. as_one:
    those of the main model hold the module. types: those that single tensors get.
    """

    name: str
    vocabulary: Mapping[str, Value]
    max_shard_bytes: int
    main: tuple[OutputShard, ...] = ()
    as_one: bool = False
    types: TensorTypes = OF_SCHEMES

    def part(
        self,
        plan: PartPlan,
        checkpoint: Checkpoint,
        family: ModelSpec,
        others: Iterable[Step] = (),
    ) -> PartPlan:
        """Return a part, planned as for files of safetensors, as GGUF files (UnsupportedError for
        a model that llama.cpp has no keys for). others: steps of the other part's tensors that
        its files have as well."""
        if self.main and plan.name == MAIN:
            return replace(plan, shards=self.main)
        others = [*others]
        steps = [
            step
            for step in chain(others, *(shard.steps for shard in plan.shards))
            if not family.carries(step.outputs[0].name)  # such a tower is a file of its own
        ]
        architecture = ARCHITECTURE_OF[str(checkpoint.config["model_type"])]
        keys = architecture.keys(family, self._modules(plan))
        form_of = architecture.form_in(keys, family.mtp_layers[0])
        kept = others if self.main else ()  # of files that have its form
        made = [step if step in kept else _as_stored(step, family, form_of) for step in steps]
        files = self._files(plan, family, architecture, made)
        if self.types.patterns:
            made = [self._typed(step, files, checkpoint) for step in made]
            files = self._files(plan, family, architecture, made)
        groups: dict[str, list[Step]] = {}
        for step in made:
            groups.setdefault(files.place(step.outputs[0].name).name, []).append(step)
        for group in groups.values():
            group.sort(key=lambda step: files.place(step.outputs[0].name).expert or 0)
        packed = pack_together(groups.values(), self.max_shard_bytes)
        tensors = len(groups) + sum(len(step.outputs) - 1 for step in made)
        shards = tuple(
            OutputShard(
                steps,
                file_name=files.shard_name(number, len(packed)),
                container=files.of_shard(number, len(packed), tensors),
            )
            for number, steps in enumerate(packed, 1)
        )
        return replace(plan, shards=shards)

    def _modules(self, plan: PartPlan) -> int:
        """Return the number of modules that a part's files hold."""
        return 1 if plan.name == MTP or self.as_one else 0

    def _typed(self, step: Step, files: GgufFiles, checkpoint: Checkpoint) -> Step:
        """Return the step of a matrix in the type that its name gets; of others as it is."""
        names = [files.place(output.name).name for output in step.outputs]
        if is_matrix(step.outputs[0]):
            return self.types.typed(step, names, checkpoint.tensors[step.inputs[0]])
        return step

    def _files(
        self, plan: PartPlan, family: ModelSpec, architecture: Architecture, steps: Iterable[Step]
    ) -> GgufFiles:
        alone = plan.name == MTP
        keys = {
            "general.type": text("model"),
            **architecture.keys(family, self._modules(plan)),
            "general.name": text(self.name),
            "general.quantization_version": u32(_QUANTIZATION_VERSION),
            "general.file_type": u32(_file_type(steps)),
            **self.vocabulary,
            **(unknown_identity() if alone else {}),
        }
        return GgufFiles(
            architecture.name,
            keys,
            base=f"mtp-{self.name}" if alone else self.name,
            module_alone=family.mtp_layers[0] if alone else None,
            mtp_layer=family.mtp_layers[0],
        )


def gguf_parts(
    target: Target,
    checkpoint: Checkpoint,
    stored: StoredModel,
    content: ContentOptions,
    types: TensorTypes = OF_SCHEMES,
) -> GgufParts | None:
    """Return what makes a target's GGUF files of a checkpoint; None for a target of safetensors.

    Raises what vocabulary_keys does of the content's pre_tokenizer; UsageError for one, for both
    parts as one, or for types, with another target.
    """
    pre_tokenizer = content.pre_tokenizer
    if not target.rewrites_main:
        if content.part is Part.ONE:
            raise UsageError(
                "Only files for llama.cpp hold the MTP module beside the main model",
                expected=f"--part {Part.BOTH}, or --target llama.cpp",
                found=f"--part {Part.ONE} --target {target.name}",
            )
        types.check_target(target.name)
        if pre_tokenizer is not None:
            raise UsageError(
                "Only files for llama.cpp have a pre-tokenizer",
                expected="--target llama.cpp",
                found=f"--target {target.name} --pre-tokenizer {pre_tokenizer[:50]}",
            )
        return None
    target.check_model_type(checkpoint.config)
    size = stored.family.facts.vocab
    keys = vocabulary_keys(checkpoint.files, checkpoint.config, size, pre_tokenizer)
    return GgufParts(
        checkpoint.path.name or "model",
        keys,
        content.max_shard_bytes,
        as_one=content.part is Part.ONE,
        types=types,
    )


def _as_stored(step: Step, family: ModelSpec, form_of: Callable[[str], Form | None]) -> Step:
    """Return the step that writes what another writes in the form that llama.cpp has it."""
    (output, *_) = step.outputs
    halves = halves_of(output.name)
    if halves:
        return _split(step, halves, _latent_sizes(family))
    is_wide = len(output.shape) < 2 or family.tensors[output.name].role in _WIDE
    form = form_of(output.name)
    if form is not None:
        return _reformed(step, form, is_wide=is_wide or form.is_wide)
    if is_wide and output.dtype != DType.F32:
        assert step.operation is COPY, "no scheme converts it"
        return step._replace(operation=Widen(), outputs=(output._replace(dtype=DType.F32),))
    return step


def _reformed(step: Step, form: Form, *, is_wide: bool) -> Step:
    """Return the step of a tensor in another form."""
    refuse_codes(step)
    output, operation = step.outputs[0], Reform(form)
    if isinstance(step.operation, Convert):
        own = step.operation
        operation = Reform(form, own.format, own.source, own.scale_rule)
    dtype = DType.F32 if is_wide else output.dtype
    formed = output._replace(dtype=dtype, shape=form.shape(output.shape))
    prefix = output.name.partition("linear_attn.")[0]
    parts = tuple(
        formed._replace(
            name=f"{prefix}{part}.weight",
            shape=(rows, *formed.shape[1:]),
        )
        for part, rows in form.parts
    )
    return step._replace(operation=operation, outputs=parts or (formed,))


def _split(step: Step, names: tuple[str, ...], sizes: LatentSizes) -> Step:
    """Return the step of both halves of a projection of latents."""
    refuse_codes(step)
    (output,) = step.outputs
    operation = SplitLatentUp(sizes)
    if isinstance(step.operation, Convert):
        own = step.operation
        operation = SplitLatentUp(
            sizes,
            (own.format.for_columns(sizes.nope), own.format.for_columns(sizes.latent)),
            own.source,
            own.scale_rule,
        )
    of_keys, of_values = operation.formats
    if sizes.nope % of_keys.k_divisor:
        raise UnsupportedError(
            f"Tensor {output.name} cannot become {of_keys.storage}",
            expected=f"qk_nope_head_dim divisible by {of_keys.k_divisor}, as its transposed half"
            " has rows of so many",
            found=sizes.nope,
            todo="Nothing was written. Choose another scheme",
        )
    shapes = (
        (sizes.heads, sizes.latent, sizes.nope),
        (sizes.heads, sizes.value, sizes.latent),
    )
    outputs = tuple(
        OutputTensor(name, _dtype_of(own, output.dtype), shape)
        for name, own, shape in zip(names, operation.formats, shapes, strict=True)
    )
    return step._replace(operation=operation, outputs=outputs)


def _dtype_of(one: WeightFormat, plain: DType) -> DType:
    """Return the dtype of what a format of GGUF files holds; that of unquantized ones is given."""
    return plain if one == UNQUANTIZED else one.tensors("", ())[0].dtype


def _latent_sizes(family: ModelSpec) -> LatentSizes:
    attention = family.every_layer[0].attention
    mla = attention.mla if isinstance(attention, SparseMla) else attention
    assert isinstance(mla, Mla), "no other attention has such a projection"
    return mla.sizes


def _file_type(steps: Iterable[Step]) -> int:
    """Return the number of the type that most elements have."""
    counts: Counter[DType] = Counter()
    for output in _outputs(steps):
        counts[output.dtype] += prod(output.shape)
    return _FILE_TYPES.get(counts.most_common(1)[0][0], _GUESSED)


def _outputs(steps: Iterable[Step]) -> Iterator[OutputTensor]:
    return (output for step in steps for output in step.outputs)

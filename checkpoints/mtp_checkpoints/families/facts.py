"""Facts of config.json about a whole model, whatever its layers are made of."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_checkpoints.dtypes import DType
from mtp_checkpoints.errors import InvalidInputError, UnsupportedError
from mtp_checkpoints.families.fields import MAX_POSITIONS, Fields

EXPERT_DTYPE = "expert_dtype"  # of config.json: numbers that quantized experts are in
_UNBOUNDED_POSITIONS = 1 << 30
_DTYPES = {"bfloat16": DType.BF16, "float16": DType.F16, "float32": DType.F32}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes and constants of a model; dtype is the safetensors dtype of weights that are not
    quantized. norm_offset is added to the weight of every norm of the stream; embedding_scale
    multiplies embeddings; logit_cap bounds logits on either side of 0, None where nothing does."""

    dtype: DType
    vocab: int
    hidden: int
    norm_eps: float
    max_positions: int
    eos_token_ids: tuple[int, ...]
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    logit_cap: float | None = None

    @classmethod
    def of(cls, fields: Fields) -> ModelFacts:
        """Read the fields that every config.json names alike."""
        fields.token_ids("bos_token_id")  # of no use here, but verify compares it
        return cls(
            dtype=_dtype(fields),
            vocab=fields.whole("vocab_size"),
            hidden=fields.whole("hidden_size"),
            norm_eps=fields.number("rms_norm_eps", 1e-6, maximum=1.0),
            max_positions=fields.whole(
                "max_position_embeddings", _UNBOUNDED_POSITIONS, maximum=MAX_POSITIONS
            ),
            eos_token_ids=fields.token_ids("eos_token_id"),
        )


def _dtype(fields: Fields) -> DType:
    name = fields.values.get("dtype") or fields.values.get("torch_dtype") or "bfloat16"
    if not isinstance(name, str) or name not in _DTYPES:
        raise InvalidInputError(
            "config.json names an unknown torch_dtype",
            expected=", ".join(_DTYPES),
            found=repr(name)[:100],
        )
    return _DTYPES[name]


class UnreleasedField(UnsupportedError):
    """A field of config.json, by its name, that no release of the family sets."""

    field = ""


def refuse_set(fields: Fields, key: str) -> None:
    """Raise UnreleasedField for a key that no release sets."""
    if fields.values.get(key):
        error = UnreleasedField(
            f"config.json sets {key}, which no released {fields.values.get('model_type')} does",
            expected="false",
            found=fields.values[key],
        )
        error.field = key
        raise error

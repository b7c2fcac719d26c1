"""The part of config.json that describes a decoder, alone or beside a vision tower."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_checkpoints.families.fields import Fields

# Read where the text part's own config has none.
_INHERITED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "mtp_contract")
_TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class TextPart:
    """A decoder's own fields of config.json, and where its tensors are.

    prefix: that of its modules' names. is_tied: head and embedding are one tensor. carried: what
    names of other parts' tensors begin with.
    """

    fields: Fields
    prefix: str
    is_tied: bool
    carried: tuple[str, ...] = ()

    @classmethod
    def whole(cls, fields: Fields) -> TextPart:
        """Return the part of a config.json that describes a text model alone."""
        return cls(fields, "model", fields.flag(_TIED, False))

    @classmethod
    def of(
        cls,
        fields: Fields,
        prefix: str = "model.language_model",
        carried: tuple[str, ...] = ("model.visual.",),
    ) -> TextPart:
        """Return the part of a config.json with a text_config beside that of a vision tower.

        Embeddings are tied where either says so: tools write the field into one of the two.
        """
        text = fields.section("text_config")
        inherited = {key: fields.values[key] for key in _INHERITED if fields.has(key)}
        return cls(
            Fields({**inherited, **text.values}, text.prefix),
            prefix,
            fields.flag(_TIED, False) or text.flag(_TIED, False),
            carried,
        )

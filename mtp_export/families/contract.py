"""The MTP contract: inputs of an MTP module that no tensor tells. Engines differ in them, and a
wrong choice only lowers acceptance."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from mtp_export.families.fields import Fields

_KEY = "mtp_contract"


class Hidden(StrEnum):
    """Side of a norm on which a hidden state is taken."""

    BEFORE_NORM = "before_norm"
    AFTER_NORM = "after_norm"


@dataclass(frozen=True)
class MtpContract:
    """Inputs of an MTP module.

    target_hidden: the main model's hidden state before or after its final norm.
    recycled_hidden: an MTP layer's own output before or after its norm, fed to the next draft when
    more than one token is drafted.
    zero_first_embedding: the row of position 0 gets a zero embedding.

    The defaults are what transformers does with DeepSeek-V3 (its MTP rows carry positions shifted
    by one throughout, which relative rotary positions do not see).
    """

    target_hidden: Hidden = Hidden.AFTER_NORM
    recycled_hidden: Hidden = Hidden.AFTER_NORM
    zero_first_embedding: bool = False

    def overridden_by(self, config: Fields) -> MtpContract:
        """Return the contract with what a config.json records as mtp_contract.

        Raises InvalidInputError for a record that is no contract.
        """
        recorded, names = config.section(_KEY), {own.name for own in fields(self)}
        if not recorded.values.keys() <= names:
            raise config.unusable(_KEY, f"an object with {', '.join(sorted(names))}")

        def hidden(key: str, usual: Hidden) -> Hidden:
            return Hidden(recorded.word(key, usual, choices=[*Hidden]))

        return MtpContract(
            hidden("target_hidden", self.target_hidden),
            hidden("recycled_hidden", self.recycled_hidden),
            recorded.flag("zero_first_embedding", self.zero_first_embedding),
        )

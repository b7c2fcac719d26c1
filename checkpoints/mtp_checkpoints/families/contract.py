"""The MTP contract: inputs of an MTP module that no tensor tells. Engines differ in them, and a
wrong choice only lowers acceptance. Each family has its own, which a config.json may override."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum

from mtp_checkpoints.families.fields import Fields

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
    source: where that is known from.
    """

    target_hidden: Hidden = Hidden.AFTER_NORM
    recycled_hidden: Hidden = Hidden.AFTER_NORM
    zero_first_embedding: bool = False
    source: str = field(default="", compare=False)

    def overridden_by(self, config: Fields) -> MtpContract:
        """Return the contract with what a config.json records as mtp_contract.

        Raises InvalidInputError for a record that is no contract.
        """
        recorded = config.section(_KEY)
        names = {each.name for each in fields(self) if each.compare}
        if not recorded.values:
            return self
        if not recorded.values.keys() <= names:
            raise config.unusable(_KEY, f"an object with {', '.join(sorted(names))}")

        def hidden(key: str, usual: Hidden) -> Hidden:
            return Hidden(recorded.word(key, usual, choices=[*Hidden]))

        return MtpContract(
            hidden("target_hidden", self.target_hidden),
            hidden("recycled_hidden", self.recycled_hidden),
            recorded.flag("zero_first_embedding", self.zero_first_embedding),
            source=f"{_KEY} of config.json",
        )

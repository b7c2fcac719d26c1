"""The MTP contract: inputs of an MTP module that no tensor and no released config.json tells.

Engines differ in them, and a wrong choice only lowers acceptance. Each family has its own, which a
config.json may override.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from mtp_export.errors import InvalidInputError

_KEY = "mtp_contract"
_FIELDS = ("target_hidden", "recycled_hidden", "zero_first_embedding")


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

    def overridden_by(self, config: Mapping[str, Any]) -> MtpContract:
        """Return the contract with what a config.json records as mtp_contract.

        Raises InvalidInputError for a record that is no contract.
        """
        if _KEY not in config:
            return self
        recorded = config[_KEY]
        if not isinstance(recorded, Mapping) or not recorded.keys() <= set(_FIELDS):
            raise _unreadable(f"an object with {', '.join(_FIELDS)}", recorded)
        own = {name: recorded.get(name, getattr(self, name)) for name in _FIELDS}
        try:
            return replace(
                self,
                target_hidden=Hidden(own["target_hidden"]),
                recycled_hidden=Hidden(own["recycled_hidden"]),
                zero_first_embedding=bool(own["zero_first_embedding"]),
                source=f"{_KEY} of config.json",
            )
        except ValueError as error:
            raise _unreadable(" or ".join(Hidden), error) from None


def _unreadable(expected: str, found: object) -> InvalidInputError:
    return InvalidInputError(
        "config.json records an mtp_contract that cannot be read", expected=expected, found=found
    )

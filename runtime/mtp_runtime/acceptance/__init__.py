"""Acceptance rules by name. A new one is one file and one line here.

`exact` leaves the target's distribution unchanged. `topp_window` and `relaxed` do not: they accept
more, and are there because engines have them.
"""

from __future__ import annotations

from mtp_runtime.acceptance.base import AcceptanceRule
from mtp_runtime.acceptance.exact import EXACT
from mtp_runtime.acceptance.relaxed import RELAXED
from mtp_runtime.acceptance.topp_window import TOPP_WINDOW

ACCEPTANCE_RULES: dict[str, AcceptanceRule] = {
    "exact": EXACT,
    "topp_window": TOPP_WINDOW,
    "relaxed": RELAXED,
}

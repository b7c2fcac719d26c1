"""Search for stop texts in a text that grows, in time linear in it, however long they are."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Search for one stop text: how much of it the text ends with, a character at a time.

    Source: Knuth, Morris and Pratt, Fast Pattern Matching in Strings. The table of borders grows
    only as far as the text has matched, so that a stop text of any length costs nothing by itself.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters of the stop text that the text ends with, not all of them
        self._borders = [0]  # of stop[: n + 1]: its longest end, not all of it, that begins it

    def is_ended_by(self, character: str) -> bool:
        """Take in the text's next character; True where the stop text ends with it."""
        self.matched = self._longer(self.matched, character)
        if self.matched < len(self.stop):
            return False
        self.matched = self._border(self.matched)
        return True

    def _longer(self, matched: int, character: str) -> int:
        """Return how much is matched behind one more character."""
        while matched and self.stop[matched] != character:
            matched = self._border(matched)
        return matched + (self.stop[matched] == character)

    def _border(self, length: int) -> int:
        while len(self._borders) < length:
            at = len(self._borders)
            self._borders.append(self._longer(self._borders[-1], self.stop[at]))
        return self._borders[length - 1]


class StopTexts:
    """Search for the first of some stop texts."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._searches = [StopText(stop) for stop in stops]

    @property
    def held(self) -> int:
        """Number of characters at the text's end that may begin a stop text."""
        return max((search.matched for search in self._searches), default=0)

    def first_in(self, piece: str) -> tuple[int, str] | None:
        """Take in a piece that the text grows by; return where the first stop text that ends in it
        begins, counted from the piece's beginning, and that stop text."""
        ends = [
            (search, at) for search in self._searches if (at := _end(search, piece)) is not None
        ]
        return min(((at - len(search.stop), search.stop) for search, at in ends), default=None)


def _end(search: StopText, piece: str) -> int | None:
    """Take in a piece; return the end of the first of the stop text that ends in it."""
    end = None
    for at, character in enumerate(piece, start=1):
        if search.is_ended_by(character) and end is None:
            end = at
    return end

"""Prefix cache: full pages of ended and running sequences, found again by the tokens in them.

The key of a page stands for all tokens up to its end and for the one after them, which the last
entry of an MTP module depends on. A page may be held by many sequences and is never written again;
one that nobody holds is kept until its place is needed, the least recently used first, and of one
sequence the last one first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import sha256

from mtp_runtime.cache import CachedSequence, PageAllocator


class SharedPages(PageAllocator):
    """Allocates pages, and keeps those of prefixes that may come again."""

    keeps_prefixes = True

    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        with_spare: bool = False,
        states: int = 0,
        state_pages: int = 0,
        drafts: int = 0,
    ) -> None:
        super().__init__(
            pages,
            page_size,
            with_spare=with_spare,
            states=states,
            state_pages=state_pages,
            drafts=drafts,
        )
        self._holders = [0] * pages  # number of sequences
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # held by nobody, next to go first

    @property
    def free_pages(self) -> int:
        """Number of pages that nobody holds, whether their entries are kept or not."""
        return super().free_pages + len(self._kept)

    def adopt(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Give an empty sequence the pages that are known of its tokens, but never its last token,
        whose logits are wanted."""
        assert not sequence.pages, "pages are adopted first"
        for key in self._keys(sequence, tokens, len(tokens) - 1):
            page = self._page_of.get(key)
            if page is None:
                break
            self._kept.pop(page, None)
            self._holders[page] += 1
            sequence.pages.append(page)
            sequence.keys.append(key)
        sequence.length = sequence.adopted = len(sequence.pages) * self.page_size

    def remember(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Note the full pages of a sequence; of equal ones the first is the one that is found."""
        for key in self._keys(sequence, tokens, sequence.length):
            page = sequence.pages[len(sequence.keys)]
            sequence.keys.append(key)
            if key not in self._page_of:
                self._page_of[key] = page
                self._key_of[page] = key

    def _keys(
        self, sequence: CachedSequence, tokens: Sequence[int], length: int
    ) -> Iterator[bytes]:
        """Yield the keys of the next full pages among the first tokens, while the caller adds them
        to the sequence's own. The token after each page must be there."""
        size = self.page_size
        for page in range(len(sequence.keys), length // size):
            parent = sequence.keys[-1] if sequence.keys else b""
            following = array("q", tokens[page * size : (page + 1) * size + 1])
            yield sha256(parent + following.tobytes()).digest()

    def _forget_page(self) -> None:
        """Free the kept page that was not used for the longest."""
        page, _ = self._kept.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        super()._give_back(page)

    def _take(self) -> int:
        if not self._free:
            self._forget_page()
        page = super()._take()
        self._holders[page] = 1
        return page

    def _give_back(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._key_of:
            self._kept[page] = None
        else:
            super()._give_back(page)

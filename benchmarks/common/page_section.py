"""Sections of a documentation page that are written from measurements."""

from __future__ import annotations


def put_section(page: str, part: str, *, heading: str, following: str) -> str:
    """Return the page with a section in place of the one of its heading, if there is one, and
    before the section that follows."""
    end = page.index(following)
    start = page.find(heading)
    return page[: end if start < 0 else start] + part + page[end:]

"""Cached machine code is that of the sources as they are."""

from __future__ import annotations

from pathlib import Path

from mtp_kernels.cpu import jit


def test_every_source_counts() -> None:
    """Compiled functions call each other across rooms: a change in any source compiles anew."""
    root = Path(jit.__file__).parents[1]
    sources = {str(path.relative_to(root)) for path in root.rglob("*.py")}
    assert {"cpu/vectors.py", "decoder/compiled_cpu/experts.py"} <= sources
    assert {name for name, _, _ in jit.SOURCES} == sources
    function = jit.compiled(lambda x: x)
    cache_file = getattr(function._cache, "_cache_file", None)
    assert cache_file is None or cache_file._source_stamp == jit.SOURCES

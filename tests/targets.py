"""Every width of vectors on any machine: LLVM splits vectors that a processor does not have.

A test that is marked `every_width` runs for this processor as it is, and again for each other
width, with the tile shapes of processors that have it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from quire import plans
from quire.codegen.llvm.target import WIDTHS, Target
from quire.config import config

NATIVE = "native"


def names() -> list[str]:
    """NATIVE, and a value of QUIRE_TARGET for each width that this processor does not have."""
    host = Target.host()
    level = "aarch64" if host.triple.startswith(("aarch64", "arm64")) else "x86-64-v3"
    return [NATIVE, *(f"{level}:{bits}" for bits in WIDTHS if bits != host.vector_bits)]


@contextlib.contextmanager
def use(name: str) -> Iterator[None]:
    """Generate code for a target while this runs, and forget what was looked up for another."""
    with pytest.MonkeyPatch.context() as patch:
        if name != NATIVE:
            patch.setitem(os.environ, "QUIRE_TARGET", name)
            _forget()
        yield
    if name != NATIVE:
        _forget()


def _forget() -> None:
    config.cache_clear()
    plans.known.clear()

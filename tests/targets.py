"""Vectors of every width, on whatever machine tests run: LLVM splits those that are too wide."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from quire.codegen.target import Target
from quire.recall import dense, pages
from quire.runtime import append, pyramids


def targets() -> dict[str, Target]:
    """Targets for this machine, by how wide their vectors and panels are."""
    host = replace(Target.host(), registers=32)
    return {
        "128 bits": replace(host, vector_bits=128, rows=6, vectors=4),
        "256 bits": replace(host, vector_bits=256, rows=6, vectors=2),
        "512 bits": replace(host, vector_bits=512, rows=8, vectors=2),
        "512 bits, wide panels": replace(host, vector_bits=512, rows=6, vectors=4),
    }


@contextlib.contextmanager
def compiled_for(target: Target) -> Iterator[None]:
    """All code is compiled for a target, and what is known from another one is not used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "host", staticmethod(lambda: target))
        for module, name in _CODE_OF_HOST:
            patch.setattr(module, name, _code_of(target, module, name))
        for way in (dense, pages):
            way._known.clear()
        yield
        for way in (dense, pages):
            way._known.clear()


_CODE_OF_HOST = ((append, "_code"), (pyramids, "_code"), (pyramids, "_builder"))
"""What remembers code without the target that it is for."""


@functools.cache  # for ever: who was given an address may still call it
def _code_of(target: Target, module: ModuleType, name: str) -> Callable[..., Any]:
    return functools.cache(getattr(module, name).__wrapped__)

"""What every form of kernel must have: a writer, scratch memory, and a record that is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from quire.codegen import scratch
from quire.codegen.convention import ENTRY, Form, KernelSpec
from quire.codegen.kernels.decode import write_decode
from quire.codegen.kernels.forward import write_forward
from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.target import Target
from quire.runtime import prepare

FORMS = get_args(Form)
TARGETS = ["x86-64-v3", "x86-64-v4", "aarch64"]


def test_the_tables_have_the_same_keys() -> None:
    assert set(FORMS) == prepare._WRITERS.keys() == scratch._REGIONS.keys()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", TARGETS)
def test_it_can_be_written_for_every_target(form: Form, target: str) -> None:
    spec = KernelSpec(Target.named(target))
    text = prepare._WRITERS[form](spec).text
    assert f"@{ENTRY}(" in text
    assert jit.compile_object(text, spec.target)


@pytest.mark.parametrize("write", [write_decode, write_forward])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("target", TARGETS)
def test_every_target_reads_float8(target: str, dtype: str, write: Callable[..., Module]) -> None:
    spec = KernelSpec(Target.named(target), key=dtype, value=dtype)
    assert "forward:" in jit.assembly(write(spec).text, spec.target)


@pytest.mark.parametrize("form", FORMS)
def test_its_scratch_is_whole_cache_lines(form: Form) -> None:
    tile = KernelSpec(Target.named("x86-64-v4")).tile
    for rows in (128, 256):
        size = scratch.scratch_bytes(form, tile, 64, 64, rows)
        assert size > 0 and size % 64 == 0

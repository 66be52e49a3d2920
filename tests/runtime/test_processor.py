"""If a processor cannot run instructions that it reports, the eager path runs and says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import quire
from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import PTR
from quire.codegen.llvm.values import Signature
from quire.config import config
from quire.runtime import cache
from quire.runtime.cache import object_cache


@pytest.fixture(autouse=True)
def _new_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    config.cache_clear()
    cache._failure.cache_clear()
    yield
    cache._failure.cache_clear()


def illegal(target: Target) -> Module:
    """A trial with an instruction that no processor runs."""
    module = Module()
    trap = module.declare(Signature("llvm.trap", ()))
    with module.function("trial", {"memory": PTR}) as f:
        f.call(trap)
    return module


def test_this_processor_runs_its_code_and_that_is_kept() -> None:
    assert cache.processor_obstacle(keep=False) is None
    assert object_cache().usage().files == 0
    assert cache.processor_obstacle() is None
    assert object_cache().usage().files == 1


def test_what_passed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.processor_obstacle() is None
    cache._failure.cache_clear()
    monkeypatch.setattr(cache, "write_trial", illegal)
    assert cache.processor_obstacle() is None


def test_an_instruction_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "write_trial", illegal)
    for _ in range(2):  # neither result is kept on the disk
        reason = cache.processor_obstacle()
        assert reason is not None
        assert "ended a trial with SIG" in reason and "use backend='eager'" in reason
        cache._failure.cache_clear()
    assert object_cache().usage().files == 0
    q = torch.randn(1, 2, 9, 8)
    text = quire.explain(q, q, q)
    reason = "jit not used because the processor must run the instructions that it lists, but code"
    assert text.startswith(f"backend='auto' uses eager.\n{reason}")
    out = quire.flex_attention(q, q, q)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q))
    with pytest.raises(quire.errors.BackendError, match="run the instructions that it lists"):
        quire.flex_attention(q, q, q, backend="jit")


def test_code_that_cannot_be_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_TRIAL", "another name")
    reason = cache.processor_obstacle()
    assert reason is not None and reason.startswith("expected an object with ['another name']")
    q = torch.randn(1, 2, 9, 8)
    assert quire.explain(q, q, q).startswith("backend='auto' uses eager.")


def test_trials_of_all_targets_compile() -> None:
    for name in ("x86-64-v3", "x86-64-v4", "aarch64", "x86-64-v3:512", "aarch64:256"):
        target = Target.named(name)
        assert jit.compile_object(cache.write_trial(target).text, target)

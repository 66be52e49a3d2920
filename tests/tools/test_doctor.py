"""The doctor: complete, and calm about machines that tell it nothing."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import llvmlite.binding as llvm
import pytest
import torch
from llvmlite.binding.targets import FeatureMap

from quire.codegen.llvm import target
from quire.config import config
from quire.runtime import cache
from quire.tools import doctor
from quire.tools.doctor import report


def finding(what: str) -> str:
    return dict(report())[what]


def test_every_row_is_there_once_and_says_something() -> None:
    rows = report()
    assert [what for what, _ in rows] == [
        "quire",
        "python",
        "torch",
        "numpy",
        "llvmlite",
        "platform",
        "cpu",
        "vector features",
        "kernels for",
        "torch threads",
        "openmp runtime",
        "environment",
        "cache directory",
        "backend eager",
        "backend inductor",
        "backend jit",
    ]
    assert all(text for _, text in rows)


def test_threads_are_those_of_torch() -> None:
    torch.set_num_threads(1)
    assert finding("torch threads").startswith("1 of ")


def test_without_proc_nothing_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_CPUINFO", tmp_path / "none")
    monkeypatch.setattr(doctor, "_MAPS", tmp_path / "none")
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "")
    assert finding("cpu") == "unknown"
    assert finding("openmp runtime") in ("unknown", "none")


def test_the_cpu_has_its_name_from_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("model\t\t: 1\nmodel name\t: Some CPU @ 2:1\nmodel name\t: Another\n")
    monkeypatch.setattr(doctor, "_CPUINFO", path)
    assert finding("cpu") == "Some CPU @ 2:1"


def test_two_openmp_runtimes_are_pointed_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00 r-xp 0 00:00 1  /usr/lib/libgomp-a34b3233.so.1\n"
        "7f01 r--p 0 00:00 1  /usr/lib/libgomp-a34b3233.so.1\n"
        "7f02 r-xp 0 00:00 2  /usr/lib/libiomp5.so\n"
        "7f03 r-xp 0 00:00 3  /usr/lib/libompositor.so\n"
    )
    monkeypatch.setattr(doctor, "_MAPS", maps)
    assert finding("openmp runtime").startswith("libgomp-a34b3233.so.1, libiomp5.so (several")


@contextlib.contextmanager
def another_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what is known about this machine, and run no trial of its instructions."""
    monkeypatch.setattr(cache, "_failure", lambda target, keep: None)
    target._host.cache_clear()
    try:
        yield
    finally:
        target._host.cache_clear()


def test_no_compiler_means_no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "strange++")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert finding("backend inductor") == (
        "no: torch.compile needs a C++ compiler and 'strange++' is not on the PATH"
    )


@pytest.mark.parametrize(
    ("triple", "features", "shown", "jit"),
    [
        ("x86_64-linux", "mmx avx2 fma f16c avx512f", "avx2 avx512f f16c fma", "yes"),
        (
            "x86_64-linux",
            "avx2",
            "avx2",
            "no: expected a processor with .* lacks fma f16c; use backend='eager'",
        ),
        ("aarch64-linux", "neon sve", "neon sve", "yes"),
        (
            "riscv64-linux",
            "v",
            "none of use",
            "no: expected a processor of .* got riscv64-linux; .*",
        ),
        ("x86_64-linux", "", "none of use", "no: .* lacks avx2 fma f16c; .*"),
    ],
)
def test_the_cpu_decides_about_jit(
    monkeypatch: pytest.MonkeyPatch, triple: str, features: str, shown: str, jit: str
) -> None:
    known = FeatureMap({"sse4a": False, **dict.fromkeys(features.split(), True)})
    monkeypatch.setattr(llvm, "get_process_triple", lambda: triple)
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: known)
    with another_host(monkeypatch):
        assert finding("vector features") == shown
        assert re.fullmatch(jit, finding("backend jit"))
        assert finding("kernels for").startswith("none: ") == jit.startswith("no")


def test_a_target_that_cannot_be_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TARGET", "i386")
    config.cache_clear()
    assert finding("kernels for").startswith("none: QUIRE_TARGET: expected a target out of")
    assert finding("backend jit").startswith("no: QUIRE_TARGET: expected a target out of")


def test_an_apple_that_does_not_tell_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> None:
        raise RuntimeError("failed to get host cpu features.")

    monkeypatch.setattr(llvm, "get_process_triple", lambda: "arm64-apple-darwin23.5.0")
    monkeypatch.setattr(llvm, "get_host_cpu_features", unknown)
    with another_host(monkeypatch):
        assert finding("vector features") == "none of use"
        assert finding("backend jit") == "yes"


class TestCacheDirectory:
    def finding(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> str:
        monkeypatch.setenv("QUIRE_CACHE_DIR", str(path))
        config.cache_clear()
        return finding("cache directory")

    def test_there(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert self.finding(monkeypatch, tmp_path) == f"{tmp_path} (used)"

    def test_to_be_made(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        path = tmp_path / "a" / "b"
        assert self.finding(monkeypatch, path) == f"{path} (will be made when needed)"
        assert not path.exists()

    def test_not_writable(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("os.access", lambda path, mode: False)
        assert self.finding(monkeypatch, tmp_path) == (
            f"{tmp_path} (not used, {tmp_path} is not writable: set QUIRE_CACHE_DIR to another)"
        )

    def test_open_to_others(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        tmp_path.chmod(0o755)
        assert "not used, others may enter it" in self.finding(monkeypatch, tmp_path)

    def test_too_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        path = Path("/" + "x" * 300)
        assert self.finding(monkeypatch, path) == (
            f"{path} (not used, it cannot be looked at (File name too long): "
            f"set QUIRE_CACHE_DIR to another)"
        )

    def test_no_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.path.expanduser", lambda path: path)
        monkeypatch.delenv("QUIRE_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        config.cache_clear()
        assert "(not used, this user has no home directory" in finding("cache directory")

    def test_a_bad_variable_is_a_finding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "must be a directory" in self.finding(monkeypatch, Path(__file__))


def test_our_variables_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CHECK", "1")
    assert "QUIRE_CHECK=1" in finding("environment")

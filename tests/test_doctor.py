"""The doctor: complete, and calm about machines that tell it nothing."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from quire import doctor
from quire.config import config
from quire.doctor import report


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


def test_without_llvmlite_and_proc_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    monkeypatch.setattr(doctor, "_CPUINFO", tmp_path / "none")
    monkeypatch.setattr(doctor, "_MAPS", tmp_path / "none")
    assert finding("vector features") == "unknown"
    assert finding("openmp runtime") in ("unknown", "none")


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "expected"),
    [
        ("x86_64", "flags\t\t: fpu avx2 fma f16c avx512f", "avx2 avx512f f16c fma"),
        ("x86_64", "flags\t\t: fpu avx2", "avx2 (missing: fma f16c)"),
        ("aarch64", "Features\t: fp asimd sve", "neon sve"),
        ("aarch64", "Features\t: fp", "none of use (missing: neon)"),
    ],
)
def test_features_from_proc(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str, cpuinfo: str, expected: str
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"model name\t: Some CPU\n{cpuinfo}\n")
    monkeypatch.setattr(doctor, "_CPUINFO", path)
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert finding("vector features") == expected
    assert finding("cpu") == "Some CPU"


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


def test_no_compiler_means_no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "strange++")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert finding("backend inductor") == (
        "no: torch.compile needs a C++ compiler and 'strange++' is not on the PATH"
    )


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", {"avx2", "fma", "f16c"}, "yes"),
        ("x86_64", {"avx2"}, "no: the CPU lacks fma and f16c"),
        ("riscv64", {"v"}, "no: no kernels for riscv64 processors"),
    ],
)
def test_the_cpu_decides_about_jit(
    monkeypatch: pytest.MonkeyPatch, machine: str, features: set[str], expected: str
) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", {"jit": None})
    monkeypatch.setattr(doctor, "_cpu_features", lambda: frozenset(features))
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert finding("backend jit") == expected


def test_no_llvmlite_means_no_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", {"jit": None})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert finding("backend jit") == "no: llvmlite is not installed"


def test_a_version_without_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BACKENDS", {})
    assert finding("backend jit") == "no: this version of quire has no compiled kernels"


class TestCacheDirectory:
    def finding(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> str:
        monkeypatch.setenv("QUIRE_CACHE_DIR", str(path))
        config.cache_clear()
        return finding("cache directory")

    def test_there(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert self.finding(monkeypatch, tmp_path) == f"{tmp_path} (writable)"

    def test_to_be_made(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        path = tmp_path / "a" / "b"
        assert self.finding(monkeypatch, path) == f"{path} (will be made when needed)"
        assert not path.exists()

    def test_not_writable(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("os.access", lambda path, mode: False)
        assert "not writable: set QUIRE_CACHE_DIR" in self.finding(monkeypatch, tmp_path)

    def test_a_bad_variable_is_a_finding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "expected a directory" in self.finding(monkeypatch, Path(__file__))


def test_our_variables_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CHECK", "1")
    assert "QUIRE_CHECK=1" in finding("environment")

"""What `quire doctor` says: the facts about this machine that decide how fast attention runs.

    >>> dict(report())["backend eager"]
    'yes'

Comes in: nothing. Goes out: rows of (what, finding), in the order in which they are worth reading.
A finding that cannot be made says so in its row; nothing here raises, writes or starts a thread.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from quire.backends import BACKENDS
from quire.config import config
from quire.errors import ArgumentError

_CPUINFO = Path("/proc/cpuinfo")
_MAPS = Path("/proc/self/maps")

# What a compiled kernel is made of, by machine (the names are LLVM's).
_NEEDED = {"x86_64": ("avx2", "fma", "f16c"), "aarch64": ("neon",), "arm64": ("neon",)}
_WORTH_NAMING = re.compile(r"avx2|fma|f16c|avx512.*|avxvnni|amx.*|neon|fullfp16|bf16|sve2?")


def report() -> list[tuple[str, str]]:
    """Every finding, as rows of (what, finding)."""
    features = _cpu_features()
    return [
        ("quire", _version("quire")),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("numpy", _version("numpy")),
        ("llvmlite", _version("llvmlite")),
        ("platform", platform.platform()),
        ("cpu", _cpu_name()),
        ("vector features", _describe(features)),
        ("torch threads", f"{torch.get_num_threads()} of {os.cpu_count()} logical cores"),
        ("openmp runtime", _openmp_runtime()),
        ("environment", _environment()),
        ("cache directory", _cache_directory()),
        ("backend eager", "yes"),
        ("backend inductor", _verdict(_why_no_inductor())),
        ("backend jit", _verdict(_why_no_jit(features))),
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _verdict(why_not: str | None) -> str:
    return "yes" if why_not is None else f"no: {why_not}"


# The processor


def _cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine() or "unknown"


def _cpuinfo(key: str) -> str:
    """The value of the first line `key : value` of /proc/cpuinfo, or nothing."""
    for line in _lines(_CPUINFO):
        name, colon, value = line.partition(":")
        if colon and name.strip().lower() == key.lower():
            return value.strip()
    return ""


def _cpu_features() -> frozenset[str]:
    """LLVM's names of what this CPU can do; empty where nothing will tell."""
    try:
        import llvmlite.binding as llvm

        return frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)
    except (ImportError, OSError, RuntimeError):
        flags = _cpuinfo("flags") or _cpuinfo("Features")  # x86, arm
        return frozenset("neon" if flag == "asimd" else flag for flag in flags.split())


def _missing(features: Iterable[str]) -> list[str]:
    return [name for name in _NEEDED.get(platform.machine(), ()) if name not in features]


def _describe(features: frozenset[str]) -> str:
    if not features:
        return "unknown"
    found = " ".join(sorted(filter(_WORTH_NAMING.fullmatch, features))) or "none of use"
    missing = _missing(features)
    return f"{found} (missing: {' '.join(missing)})" if missing else found


# Threads and files


def _openmp_runtime() -> str:
    """The OpenMP libraries in this process: two of them compete for the same cores."""
    pattern = re.compile(r"/(lib(?:gomp|iomp5|omp)\b[^/\s]*)")
    libraries = sorted({m[1] for line in _lines(_MAPS) if (m := pattern.search(line))})
    if not libraries:
        return "unknown" if torch.backends.openmp.is_available() else "none"
    warning = " (several at once: expect slow threads)" if len(libraries) > 1 else ""
    return ", ".join(libraries) + warning


def _environment() -> str:
    ours = sorted(name for name in os.environ if name.startswith("QUIRE_"))
    return " ".join(f"{name}={os.environ[name]}" for name in ours) or "no QUIRE_ variable set"


def _cache_directory() -> str:
    try:
        path = config().cache_dir
    except ArgumentError as error:
        return str(error)
    existing = next((p for p in (path, *path.parents) if p.exists()), Path(path.anchor))
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        return f"{path} (not writable: set QUIRE_CACHE_DIR to a directory that is)"
    return f"{path} ({'writable' if existing == path else 'will be made when needed'})"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:  # not Linux, or a sandbox
        return []


# Backends


def _why_no_inductor() -> str | None:
    """torch.compile on a CPU writes C++ and needs a compiler for it."""
    default = "clang++" if sys.platform == "darwin" else "g++"
    compiler = os.environ.get("CXX", default)
    if shutil.which(compiler):
        return None
    return f"torch.compile needs a C++ compiler and {compiler!r} is not on the PATH"


def _why_no_jit(features: frozenset[str]) -> str | None:
    if "jit" not in BACKENDS:
        return "this version of quire has no compiled kernels"
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed"
    if platform.machine() not in _NEEDED:
        return f"no kernels for {platform.machine()} processors"
    if missing := _missing(features):
        return f"the CPU lacks {' and '.join(missing)}"
    return None

"""The command `quire doctor`: facts about this machine that decide how fast attention runs.

    >>> dict(report())["backend eager"]
    'yes'

Rows are (what, finding). If something cannot be found out, its row says so. Nothing here raises,
writes a file or starts a thread.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from pathlib import Path

import torch

from quire.codegen.llvm.target import Target, host_features
from quire.errors import ArgumentError, QuireError
from quire.runtime.cache import object_cache, processor_obstacle

_CPUINFO = Path("/proc/cpuinfo")
_MAPS = Path("/proc/self/maps")

# LLVM's names of features that make kernels fast.
_WORTH_NAMING = re.compile(r"avx2|fma|f16c|avx512.*|avxvnni|amx.*|neon|fullfp16|bf16|sve2?")


def report() -> list[tuple[str, str]]:
    """Return all rows of (what, finding)."""
    return [
        ("quire", _version("quire")),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("numpy", _version("numpy")),
        ("llvmlite", _version("llvmlite")),
        ("platform", platform.platform()),
        ("cpu", _cpu_name()),
        ("vector features", _vector_features()),
        ("kernels for", _target()),
        ("torch threads", f"{torch.get_num_threads()} of {os.cpu_count()} logical cores"),
        ("openmp runtime", _openmp_runtime()),
        ("environment", _environment()),
        ("cache directory", _cache_directory()),
        ("backend eager", "yes"),
        ("backend inductor", _verdict(_why_no_inductor())),
        ("backend jit", _verdict(_why_no_jit())),
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
    names = (line.partition(":")[2] for line in _lines(_CPUINFO) if line.startswith("model name"))
    return next(names, "").strip() or platform.processor() or platform.machine() or "unknown"


def _vector_features() -> str:
    present = {name for name, has in host_features().items() if has}
    return " ".join(sorted(filter(_WORTH_NAMING.fullmatch, present))) or "none of use"


def _target() -> str:
    try:
        return str(Target.host())
    except QuireError as error:
        return f"none: {error}"


# Threads and files


def _openmp_runtime() -> str:
    """Return the OpenMP libraries in this process. Two of them would compete for cores."""
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
        cache = object_cache()
    except ArgumentError as error:
        return str(error)
    if reason := cache.obstacle():
        return f"{cache.directory} (not used, {reason}: set QUIRE_CACHE_DIR to another)"
    state = "used" if cache.directory.exists() else "will be made when needed"
    return f"{cache.directory} ({state})"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:  # not Linux, or a sandbox
        return []


# Backends


def _why_no_inductor() -> str | None:
    """Return why inductor cannot run: torch.compile needs a C++ compiler on a CPU."""
    default = "clang++" if sys.platform == "darwin" else "g++"
    compiler = os.environ.get("CXX", default)
    if shutil.which(compiler):
        return None
    return f"torch.compile needs a C++ compiler and {compiler!r} is not on the PATH"


def _why_no_jit() -> str | None:
    try:
        return processor_obstacle(keep=False)
    except ArgumentError as error:
        return str(error)

"""Compiled code on disk, so that each kernel is compiled once, not once per process.

Code from this directory is run, so it must come from this user: the directory must belong to the
user with mode 0700, a file must be a regular file of the user, and begin with a digest of its name
and content. Any other file counts as absent and is written anew. If the directory cannot be used,
or the user has no home directory, kernels are compiled in every process; that is no error. Files
with other names are never touched.

Windows has no modes. Its default directory is in the user's profile, which other users may not
enter. Whoever chooses another directory must protect it.

    <directory>/<key>.o        MAGIC, sha256 of the key and the object, the object
    <directory>/<key>.*.tmp    a file that is being written, or was left by a process that was
                               killed; it is deleted after an hour

An emulator may list instructions that it cannot run. So before code is first generated for a
target, a child process runs a small function with instructions of each kind. If that kills the
child, no kernel is used, and `processor_obstacle` returns the reason. A success is stored with the
kernels, so that later processes need no trial.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import signal
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import quire.codegen
import quire.ir
from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.jit import llvm_version
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F16, F32, F64, I8, I32, PTR
from quire.config import config
from quire.errors import ArgumentError, BackendError, CodegenError

MAGIC = b"quire object 2\n"
LIMIT_BYTES = 256 * 2**20
WRITTEN_WITHIN = 3600  # seconds; an older incomplete file was left by a killed process
_DIGEST_BYTES = hashlib.sha256().digest_size
_NAME = re.compile(r"[0-9a-f]{64}\.(o|\w+\.tmp)")


class Usage(NamedTuple):
    """The number of files in a cache, and their bytes."""

    files: int
    size: int


class ObjectCache:
    """A directory of object files."""

    def __init__(self, directory: Path, limit: int = LIMIT_BYTES) -> None:
        self.directory = directory
        self.limit = limit

    def get(self, key: str) -> bytes | None:
        """Return the object of `key`; None if there is none that can be trusted."""
        if self._distrust() is not None:
            return None
        with contextlib.suppress(OSError):
            content = _read_own_file(self._path(key))
            head, digest = len(MAGIC), len(MAGIC) + _DIGEST_BYTES
            image = content[digest:]
            if content[:head] == MAGIC and content[head:digest] == _digest(key, image):
                return image
        return None

    def put(self, key: str, image: bytes) -> None:
        """Store an object. Readers see the old file or the new one, never a part."""
        with contextlib.suppress(OSError):
            if self._distrust() is None:
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._distrust() is not None:
                return
            handle, name = tempfile.mkstemp(".tmp", f"{key}.", self.directory)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(MAGIC + _digest(key, image) + image)
                os.replace(name, self._path(key))
            except OSError:
                os.unlink(name)
                raise
            self._clean_up()

    def obstacle(self) -> str | None:
        """Return why the directory cannot be used; None if it can, or can be made."""
        return self._distrust() or self._unwritable()

    def clear(self) -> int:
        """Remove every file that `put` made, and return their number."""
        reason = self.obstacle()
        if reason is not None:
            raise ArgumentError(
                f"the cache directory must be one that quire can use, but {self.directory} is not: "
                f"{reason}. Set QUIRE_CACHE_DIR to another, or empty it by hand."
            )
        removed = 0
        for path, _ in list(self._files()):
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
        return removed

    def usage(self) -> Usage:
        """Return the number and size of the files in the directory."""
        sizes = [status.st_size for _, status in self._files()]
        return Usage(len(sizes), sum(sizes))

    def _path(self, key: str) -> Path:
        path = self.directory / f"{key}.o"
        assert _NAME.fullmatch(path.name), f"{key!r} is no result of cache_key"
        return path

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the files that `put` made, and no others."""
        if self._distrust() is not None:
            return
        for path in self.directory.glob("*"):
            if _NAME.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    status = os.lstat(path)
                    if _is_own_file(status):
                        yield path, status

    def _distrust(self) -> str | None:
        """Return why other users could write here; None if they cannot, or nothing is here yet."""
        if not self.directory.is_absolute():
            return "this user has no home directory"
        try:
            status = os.lstat(self.directory)
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"it cannot be looked at ({error.strerror})"
        if not stat.S_ISDIR(status.st_mode):
            return "it is not a directory itself, but a file or a link"
        if not _is_own(status):
            return "it belongs to another user"
        mode = stat.S_IMODE(status.st_mode) if _HAS_MODES else 0o700
        return f"others may enter it (mode {mode:03o}, not 700)" if mode & 0o077 else None

    def _unwritable(self) -> str | None:
        """Return why no file can be made here, or why the directory cannot be made."""
        upward = (self.directory, *self.directory.parents)
        existing = next(filter(os.path.lexists, upward), self.directory)
        if not (os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)):
            return f"{existing} is not writable"
        try:
            os.lstat(self.directory / f"{'0' * 64}.12345678.tmp")
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"no file can be made in it ({error.strerror})"
        return None

    def _clean_up(self) -> None:
        """Delete files of killed processes, and the oldest files until the limit is kept."""
        files = sorted(self._files(), key=lambda file: file[1].st_mtime)
        for path, status in files:
            if path.suffix == ".tmp" and time.time() - status.st_mtime > WRITTEN_WITHIN:
                with contextlib.suppress(OSError):
                    path.unlink()
        total = sum(status.st_size for _, status in files)
        for path, status in files:
            if total <= self.limit:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                total -= status.st_size


_HAS_MODES = os.name != "nt"


def _digest(key: str, image: bytes) -> bytes:
    """Return the digest of an object and its key, so that a renamed file is not accepted."""
    return hashlib.sha256(key.encode() + image).digest()


def _is_own(status: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def _is_own_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and _is_own(status)


def _read_own_file(path: Path) -> bytes:
    """Return the bytes of a regular file of this user. Do not follow links or wait for pipes."""
    handle = os.open(path, _OPEN)
    with os.fdopen(handle, "rb") as file:
        if not _is_own_file(os.fstat(handle)):
            raise OSError(f"{path} is not a file of this user")
        return file.read()


_FLAGS = ("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")  # Windows has the first and last
_OPEN = sum(getattr(os, flag, 0) for flag in _FLAGS)


def object_cache() -> ObjectCache:
    """Return the cache in the directory that is configured."""
    return ObjectCache(config().cache_dir)


def cache_key(*parts: str) -> str:
    """Return the name of an object: a hash of its inputs, of LLVM and of the code generator."""
    whole = "\0".join((*parts, llvm_version(), source_digest()))
    return hashlib.sha256(whole.encode()).hexdigest()


@functools.cache
def source_digest() -> str:
    """Return a hash of the source of the code generator, so that its versions share no objects."""
    digest = hashlib.sha256()
    for package in (quire.codegen, quire.ir):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def code_of(
    key: str, target: Target, write: Callable[[], Module], exports: Sequence[str]
) -> jit.Code:
    """Return code from the disk cache; or compile the module of `write`, and store it there."""
    cache = object_cache()
    image = cache.get(key)
    if image is not None:
        with contextlib.suppress(CodegenError):  # if it does not load, compile it again
            return jit.load(image, exports)
    image = jit.compile_object(write().text, target)
    code = jit.load(image, exports)
    cache.put(key, image)
    return code


# --- a trial of the processor ---------------------------------------------------------------------

_TRIAL = "trial"


def processor_obstacle(*, keep: bool = True) -> str | None:
    """Return why no kernel runs on this machine; None if kernels run. `keep` stores a success."""
    try:
        target = Target.host()
    except BackendError as error:
        return str(error)
    return _failure(target, keep)


@functools.cache
def _failure(target: Target, keep: bool) -> str | None:
    key, cache = cache_key(_TRIAL, repr(target)), object_cache()
    if cache.get(key) is not None:
        return None
    try:
        image = jit.compile_object(write_trial(target).text, target)
        ending = _run_in_child(image)
    except CodegenError as error:  # on a system that quire was not tested on
        return f"{error}, as code for {target} was linked; use backend='eager'"
    if ending:
        return (
            f"the processor must run the instructions that it lists, but code for {target} ended "
            f"a trial with {ending}; use backend='eager', or set QUIRE_TARGET to an older processor"
        )
    if keep:
        cache.put(key, image)
    return None


def write_trial(target: Target) -> Module:
    """Return a module with `trial`: void(ptr), which has vector instructions of each kind."""
    module = Module()
    lanes = target.lanes(F32)
    with module.function("trial", {"memory": PTR}) as f:
        (memory,) = f.parameters
        singles = f.convert(f.load(F16.vector(lanes), memory), F32.vector(lanes))
        doubles = f.convert(f.load(F32.vector(lanes // 2), memory), F64.vector(lanes // 2))
        bytes_ = f.convert(f.load(I8.vector(lanes), memory), I32.vector(lanes))
        sums = f.fma(singles, f.convert(bytes_ * bytes_, F32.vector(lanes)), 1.0)
        sums = f.select(sums < 0.0, f.shuffle(sums, sums, list(reversed(range(lanes)))), sums)
        f.store(sums, memory)
        f.store(f.fma(doubles, doubles, 1.0), memory, lanes)
    return module


def _run_in_child(image: bytes) -> str:
    """Run a trial in a child. Return the signal that killed it; "" if none did, or without fork."""
    if not hasattr(os, "fork"):
        return ""
    code = jit.load(image, [_TRIAL])
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address(_TRIAL))
    memory = ctypes.create_string_buffer(4096)
    address = (ctypes.addressof(memory) + 63) & ~63
    with warnings.catch_warnings():
        # Forking is safe here: the child takes no lock and starts no thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        run(address)
        os._exit(0)
    try:
        _, status = os.waitpid(child, 0)
    except ChildProcessError:  # the program ignores SIGCHLD, so the status is lost
        return ""
    if not os.WIFSIGNALED(status):
        return ""
    return signal.Signals(os.WTERMSIG(status)).name

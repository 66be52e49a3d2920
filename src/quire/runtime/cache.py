"""Object code on disk, so that a new process need not compile what an old one has.

Code from this directory is run, so it is believed only if nobody else could have put it there: the
directory belongs to the user with mode 0700, a file is a regular file of the user's, and it begins
with a digest of its name and the rest. Anything else counts as absent and is written anew. A cache
that cannot be read or written is no cache, never an error, and so is one without a place: a user
who has no home directory. Files of any other name are never touched.

Windows knows no modes. The default directory is within the user's profile there, which others may
not enter, and it inherits that; who names another directory has to see to it.

    <directory>/<key>.o        MAGIC, sha256 of the key and the object, the object
    <directory>/<key>.*.tmp    the same while it is written, or left behind by a process that ended,
                               until it is an hour old
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import quire.codegen
import quire.ir
from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.jit import llvm_version
from quire.codegen.llvm.target import Target
from quire.config import config
from quire.errors import ArgumentError, CodegenError

MAGIC = b"quire object 2\n"
LIMIT_BYTES = 256 * 2**20
WRITTEN_WITHIN = 3600  # seconds: what is older and not complete was left behind
_DIGEST_BYTES = hashlib.sha256().digest_size
_NAME = re.compile(r"[0-9a-f]{64}\.(o|\w+\.tmp)")


class Usage(NamedTuple):
    """How much a cache holds, in files and bytes."""

    files: int
    size: int


class ObjectCache:
    """A directory of object files."""

    def __init__(self, directory: Path, limit: int = LIMIT_BYTES) -> None:
        self.directory = directory
        self.limit = limit

    def get(self, key: str) -> bytes | None:
        """The object that was stored under `key`; None if there is none that can be trusted."""
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
        """Store an object. Readers see the old file, or the new one, never a part."""
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
        """Why nothing is kept in the directory; None where it is, or will be once it is made."""
        return self._distrust() or self._unwritable()

    def clear(self) -> int:
        """Remove every file of ours; returns how many there were."""
        reason = self.obstacle()
        if reason is not None:
            raise ArgumentError(
                f"expected a cache directory that quire uses, but it does not use "
                f"{self.directory}: {reason}. Set QUIRE_CACHE_DIR to another, or empty it by hand."
            )
        removed = 0
        for path, _ in list(self._files()):
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
        return removed

    def usage(self) -> Usage:
        """What the directory holds now."""
        sizes = [status.st_size for _, status in self._files()]
        return Usage(len(sizes), sum(sizes))

    def _path(self, key: str) -> Path:
        path = self.directory / f"{key}.o"
        assert _NAME.fullmatch(path.name), f"{key!r} is no result of cache_key"
        return path

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """The files that `put` made, and nothing else that lies beside them."""
        if self._distrust() is not None:
            return
        for path in self.directory.glob("*"):
            if _NAME.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    status = os.lstat(path)
                    if _is_own_file(status):
                        yield path, status

    def _distrust(self) -> str | None:
        """Why others could have put something here; None where they could not, or nothing is."""
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
        """Why no file can be made here, or not the directory itself."""
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
        """Drop what was left behind, and what was written longest ago until the limit holds."""
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
    """Of an object under its name, so that no other's is taken for it."""
    return hashlib.sha256(key.encode() + image).digest()


def _is_own(status: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def _is_own_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and _is_own(status)


def _read_own_file(path: Path) -> bytes:
    """The bytes of a regular file of this user's; links are not followed, pipes not waited for."""
    handle = os.open(path, _OPEN)
    with os.fdopen(handle, "rb") as file:
        if not _is_own_file(os.fstat(handle)):
            raise OSError(f"{path} is not a file of this user's")
        return file.read()


_FLAGS = ("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")  # Windows has the first and last
_OPEN = sum(getattr(os, flag, 0) for flag in _FLAGS)


def object_cache() -> ObjectCache:
    """The cache of this process, where the configuration says."""
    return ObjectCache(config().cache_dir)


def cache_key(*parts: str) -> str:
    """A name for an object: a hash of what it is made from and of what makes it."""
    whole = "\0".join((*parts, llvm_version(), source_digest()))
    return hashlib.sha256(whole.encode()).hexdigest()


@functools.cache
def source_digest() -> str:
    """A hash of the code generator itself, so that no version of it uses another's objects."""
    digest = hashlib.sha256()
    for package in (quire.codegen, quire.ir):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def code_of(
    key: str, target: Target, write: Callable[[], Module], exports: Sequence[str]
) -> jit.Code:
    """Code from the disk cache, or of the module that `write` gives, which is then kept there."""
    cache = object_cache()
    image = cache.get(key)
    if image is not None:
        with contextlib.suppress(CodegenError):  # it does not load: another takes its place
            return jit.load(image, exports)
    image = jit.compile_object(write().text, target)
    code = jit.load(image, exports)
    cache.put(key, image)
    return code

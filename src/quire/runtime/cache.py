"""Object code on disk, so that a new process need not compile what an old one has.

Code from this directory is run, so it is believed only if nobody else could have put it there: the
directory belongs to the user with mode 0700, a file is a regular file of the user's, and it begins
with a digest of the rest. Anything else counts as absent and is written anew. A cache that cannot
be read or written is no cache, never an error.

    <directory>/<key>.o    MAGIC, sha256 of the object, the object
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import quire.codegen
import quire.ir
from quire.codegen.jit import llvm_version
from quire.config import config

MAGIC = b"quire object 1\n"
LIMIT_BYTES = 256 * 2**20
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Usage:
    """How much a cache holds."""

    directory: Path
    usable: bool
    files: int
    size: int


class ObjectCache:
    """A directory of object files."""

    def __init__(self, directory: Path, limit: int = LIMIT_BYTES) -> None:
        self.directory = directory
        self.limit = limit

    def get(self, key: str) -> bytes | None:
        """The object that was stored under `key`; None if there is none that can be trusted."""
        if not self._is_ours():
            return None
        with contextlib.suppress(OSError):
            content = _read_own_file(self._path(key))
            head, digest = len(MAGIC), len(MAGIC) + _DIGEST_BYTES
            image = content[digest:]
            if content[:head] == MAGIC and content[head:digest] == hashlib.sha256(image).digest():
                return image
        return None

    def put(self, key: str, image: bytes) -> None:
        """Store an object. Readers see the old file, or the new one, never a part."""
        with contextlib.suppress(OSError):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_ours():
                return
            handle, name = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(MAGIC + hashlib.sha256(image).digest() + image)
                os.replace(name, self._path(key))
            except OSError:
                os.unlink(name)
                raise
            self._evict()

    def clear(self) -> int:
        """Remove every file of ours; returns how many there were."""
        removed = 0
        for path in self._files():
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
        return removed

    def usage(self) -> Usage:
        """What the directory holds now."""
        sizes = []
        for path in self._files():
            with contextlib.suppress(OSError):
                sizes.append(path.stat(follow_symlinks=False).st_size)
        return Usage(self.directory, self._is_ours(), len(sizes), sum(sizes))

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.o"

    def _files(self) -> Iterator[Path]:
        if self._is_ours():
            yield from self.directory.glob("*.o")
            yield from self.directory.glob("*.tmp")

    def _is_ours(self) -> bool:
        """A real directory of this user's that nobody else can write to or look into."""
        try:
            status = os.lstat(self.directory)
        except OSError:
            return False
        private = stat.S_IMODE(status.st_mode) & 0o077 == 0
        return stat.S_ISDIR(status.st_mode) and private and _is_own(status)

    def _evict(self) -> None:
        """Drop what was written longest ago until the limit holds."""
        entries = []
        for path in self._files():
            with contextlib.suppress(OSError):
                status = path.stat(follow_symlinks=False)
                entries.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size


def _is_own(status: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def _read_own_file(path: Path) -> bytes:
    """The bytes of a regular file of this user's; symbolic links are not followed."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or not _is_own(status):
            raise OSError(f"{path} is not a file of this user's")
        return file.read()


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
        for path in sorted(Path(package.__path__[0]).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()

"""The disk cache: believes only what this user wrote, survives everything else."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import time
from pathlib import Path

import pytest
from forking import forks

from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import I64
from quire.errors import ArgumentError
from quire.runtime import cache as cache_module
from quire.runtime.cache import MAGIC, ObjectCache, Usage, cache_key

IMAGE = b"\x7fELF" + bytes(range(256)) * 8
A, B, C, D, E = (cache_key(name) for name in "abcde")


@pytest.fixture
def cache(tmp_path: Path) -> ObjectCache:
    return ObjectCache(tmp_path / "kernels")


def test_what_was_put_is_got(cache: ObjectCache) -> None:
    assert cache.get(A) is None
    cache.put(A, IMAGE)
    assert cache.get(A) == IMAGE
    assert cache.get(B) is None
    assert cache.directory.stat().st_mode & 0o777 == 0o700
    assert cache.usage().files == 1
    assert cache.clear() == 1
    assert cache.get(A) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: b"#!/bin/sh\n" + content,
        lambda content: MAGIC + content[len(MAGIC) + 1 :],
    ],
    ids=["truncated", "empty", "flipped bit", "foreign", "shifted"],
)
def test_a_damaged_file_is_ignored_and_rebuilt(cache: ObjectCache, damage) -> None:
    cache.put(A, IMAGE)
    path = cache.directory / f"{A}.o"
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get(A) is None
    cache.put(A, IMAGE)
    assert cache.get(A) == IMAGE


def test_a_file_under_the_name_of_another_is_ignored(cache: ObjectCache) -> None:
    cache.put(A, IMAGE)
    cache.put(B, IMAGE[::-1])
    (cache.directory / f"{A}.o").replace(cache.directory / f"{B}.o")
    assert cache.get(B) is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in directories on this system")
@pytest.mark.timeout(10)
def test_a_pipe_is_not_waited_for(cache: ObjectCache) -> None:
    cache.put(A, IMAGE)
    (cache.directory / f"{A}.o").unlink()
    os.mkfifo(cache.directory / f"{A}.o")
    assert cache.get(A) is None
    cache.put(A, IMAGE)
    assert cache.get(A) == IMAGE


def test_what_killed_processes_left_behind_goes_after_an_hour(cache: ObjectCache) -> None:
    cache.put(A, IMAGE)
    old, new = (cache.directory / f"{B}.{name}.tmp" for name in ("old", "new"))
    note = cache.directory / "note.tmp"
    for path in (old, new, note, cache.directory / f"{A}.o"):
        path.touch()
        if path != new:
            os.utime(path, (time.time() - 3700,) * 2)
    cache.put(C, IMAGE)
    assert not old.exists()
    assert new.exists() and note.exists()
    assert cache.get(A) == IMAGE


def test_without_a_home_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cache = ObjectCache(Path("~/.cache/quire"))
    cache.put(A, IMAGE)
    assert cache.get(A) is None
    assert cache.obstacle() == "this user has no home directory"
    assert os.listdir() == []


@pytest.mark.parametrize("length", [300, 4095])
def test_a_path_that_is_too_long(tmp_path: Path, length: int) -> None:
    name = "x" * length if length < 1000 else "/".join(["x" * 99] * 41)
    cache = ObjectCache(tmp_path / name)
    cache.put(A, IMAGE)
    assert cache.get(A) is None
    assert cache.usage() == Usage(files=0, size=0)
    assert cache.obstacle() == "it cannot be looked at (File name too long)"


def test_files_whose_paths_are_too_long(tmp_path: Path) -> None:
    room = os.pathconf(tmp_path, "PC_PATH_MAX") - len(os.fspath(tmp_path)) - 40
    name = "/".join("x" * 99 for _ in range(room // 100))
    cache = ObjectCache(tmp_path / name / ("y" * (room % 100)))
    assert cache.obstacle() == "no file can be made in it (File name too long)"
    cache.put(A, IMAGE)
    assert cache.get(A) is None


def test_where_there_are_no_modes_none_is_asked_for(
    cache: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.directory.mkdir(mode=0o777)
    cache.directory.chmod(0o777)
    cache.put(A, IMAGE)
    assert cache.get(A) is None
    monkeypatch.setattr(cache_module, "_HAS_MODES", False)
    monkeypatch.delattr(os, "getuid", raising=False)
    cache.put(A, IMAGE)
    assert cache.obstacle() is None
    assert cache.get(A) == IMAGE


def answering(number: int) -> Module:
    module = Module()
    with module.function("answer", {}, I64) as f:
        f.give_back(f.value(number, I64))
    return module


def test_what_does_not_load_is_compiled_anew(
    cache: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "object_cache", lambda: cache)
    written: list[int] = []

    def answer() -> int:
        def write() -> Module:
            written.append(1)
            return answering(42)

        code = cache_module.code_of(A, Target.host(), write, ["answer"])
        return int(ctypes.CFUNCTYPE(ctypes.c_int64)(code.address("answer"))())

    other = Module()
    with other.function("question", {}):
        pass
    for image in (b"no object", jit.compile_object(other.text, Target.host())):
        cache.put(A, image)
        written.clear()
        assert [answer(), answer()] == [42, 42]
        assert len(written) == 1  # it has taken the place of what was there
    cache.put(A, jit.compile_object(answering(7).text, Target.host()))
    assert answer() == 7  # and what loads is not compiled


def test_a_symbolic_link_is_not_followed(cache: ObjectCache, tmp_path: Path) -> None:
    cache.put(A, IMAGE)
    moved = tmp_path / "elsewhere.o"
    (cache.directory / f"{A}.o").rename(moved)
    (cache.directory / f"{A}.o").symlink_to(moved)
    assert cache.get(A) is None
    cache.put(A, IMAGE)
    assert cache.get(A) == IMAGE
    assert not (cache.directory / f"{A}.o").is_symlink()


def test_a_directory_that_others_can_enter_is_not_used(cache: ObjectCache) -> None:
    cache.put(A, IMAGE)
    cache.directory.chmod(0o755)
    assert cache.get(A) is None
    assert cache.obstacle() == "others may enter it (mode 755, not 700)"
    cache.put(B, IMAGE)
    assert not (cache.directory / f"{B}.o").exists()


def test_a_linked_directory_is_not_used(tmp_path: Path) -> None:
    real = ObjectCache(tmp_path / "real")
    real.put(A, IMAGE)
    (tmp_path / "link").symlink_to(real.directory)
    linked = ObjectCache(tmp_path / "link")
    assert linked.get(A) is None
    assert linked.obstacle() == "it is not a directory itself, but a file or a link"


def test_a_directory_of_another_user_is_not_used(cache: ObjectCache, monkeypatch) -> None:
    cache.put(A, IMAGE)
    monkeypatch.setattr(os, "getuid", lambda: os.stat(cache.directory).st_uid + 1)
    assert cache.get(A) is None
    assert cache.obstacle() == "it belongs to another user"


def test_a_directory_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = ObjectCache(tmp_path / "file" / "kernels")
    cache.put(A, IMAGE)
    assert cache.get(A) is None
    assert cache.usage().files == 0
    assert cache.obstacle() == "it cannot be looked at (Not a directory)"


def test_a_directory_that_nobody_may_write_to(cache: ObjectCache, monkeypatch) -> None:
    assert cache.obstacle() is None  # it will be made
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: bool(asked.append(path)))
    assert cache.obstacle() == f"{cache.directory.parent} is not writable"
    cache.directory.mkdir(mode=0o700)
    assert cache.obstacle() == f"{cache.directory} is not writable"
    assert asked == [cache.directory.parent, cache.directory]


def test_only_our_own_files_count_and_are_removed(cache: ObjectCache, tmp_path: Path) -> None:
    cache.put(A, IMAGE)
    cache.put(B, IMAGE)
    left_behind = cache.directory / f"{C}.x1_y.tmp"
    left_behind.write_bytes(b"half an obj")
    (tmp_path / "precious").write_text("of the user")
    link, folder = cache.directory / f"{D}.o", cache.directory / f"{E}.o"
    link.symlink_to(tmp_path / "precious")
    folder.mkdir()
    others = [cache.directory / name for name in ("main.o", "notes.tmp", f"{A}.o.bak", f"x{A}.o")]
    for path in others:
        path.write_text("of the user")

    size = 2 * (len(MAGIC) + 32 + len(IMAGE)) + len(b"half an obj")
    assert cache.usage() == Usage(files=3, size=size)
    assert cache.clear() == 3
    assert cache.usage() == Usage(files=0, size=0)
    assert sorted(cache.directory.iterdir()) == sorted([link, folder, *others])
    assert (tmp_path / "precious").read_text() == "of the user"


def test_the_limit_spares_the_files_of_others(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "kernels", limit=0)
    cache.directory.mkdir(mode=0o700)
    (cache.directory / "main.o").write_text("of the user")
    cache.put(A, IMAGE)
    assert [path.name for path in cache.directory.iterdir()] == ["main.o"]


def test_a_directory_that_is_not_used_is_not_cleared(cache: ObjectCache) -> None:
    cache.put(A, IMAGE)
    cache.directory.chmod(0o750)
    with pytest.raises(ArgumentError, match=r"but .*kernels is not: others may enter .*750.* Set"):
        cache.clear()
    assert (cache.directory / f"{A}.o").exists()


def test_a_directory_that_is_not_there_is_empty(cache: ObjectCache) -> None:
    assert cache.usage() == Usage(files=0, size=0)
    assert cache.clear() == 0
    assert not cache.directory.exists()


def test_a_full_disk_is_no_error_and_leaves_nothing(cache: ObjectCache, monkeypatch) -> None:
    cache.put(A, IMAGE)

    def no_space(*unused: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    cache.put(B, IMAGE)
    assert cache.get(B) is None
    assert [path.name for path in cache.directory.iterdir()] == [f"{A}.o"]


def test_the_oldest_go_when_the_limit_is_reached(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "kernels", limit=3 * (len(IMAGE) + 64))
    for age, key in enumerate((A, B, C, D)):
        cache.put(key, IMAGE)
        path = cache.directory / f"{key}.o"
        if path.exists():
            os.utime(path, (1000 + age, 1000 + age))
    cache.put(E, IMAGE)
    assert cache.get(A) is None
    assert cache.get(E) == IMAGE
    assert cache.usage().size <= cache.limit


def _put_and_get(directory: Path) -> bool:
    cache = ObjectCache(directory)
    for _ in range(20):
        cache.put(A, IMAGE)
        if cache.get(A) not in (IMAGE, None):
            return False
    return cache.get(A) == IMAGE


@forks
def test_ten_processes_at_once(cache: ObjectCache) -> None:
    with multiprocessing.get_context("fork").Pool(10) as pool:
        assert all(pool.map(_put_and_get, [cache.directory] * 10))
    assert [path.name for path in cache.directory.iterdir()] == [f"{A}.o"]


def test_the_key_depends_on_everything(monkeypatch) -> None:
    keys = {cache_key("a", "b"), cache_key("ab"), cache_key("a", "c"), cache_key("a")}
    monkeypatch.setattr(cache_module, "llvm_version", lambda: "0.0.0")
    keys.add(cache_key("a", "b"))
    monkeypatch.setattr(cache_module, "source_digest", lambda: "other")
    keys.add(cache_key("a", "b"))
    assert len(keys) == 6


def test_the_digest_is_that_of_all_folders_of_the_generator(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(cache_module.quire.codegen, "__path__", [str(tmp_path)])
    digests = set()
    for text in ("", "first = 1", "second = 2"):
        (tmp_path / "folder" / "module.py").write_text(text)
        digests.add(cache_module.source_digest.__wrapped__())
    assert len(digests) == 3

"""The disk cache: believes only what this user wrote, survives everything else."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path

import pytest

from quire.runtime import cache as cache_module
from quire.runtime.cache import MAGIC, ObjectCache, cache_key

IMAGE = b"\x7fELF" + bytes(range(256)) * 8


@pytest.fixture
def cache(tmp_path: Path) -> ObjectCache:
    return ObjectCache(tmp_path / "kernels")


def test_what_was_put_is_got(cache: ObjectCache) -> None:
    assert cache.get("a") is None
    cache.put("a", IMAGE)
    assert cache.get("a") == IMAGE
    assert cache.get("b") is None
    assert cache.directory.stat().st_mode & 0o777 == 0o700
    assert cache.usage().files == 1
    assert cache.clear() == 1
    assert cache.get("a") is None


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
    cache.put("a", IMAGE)
    path = cache.directory / "a.o"
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get("a") is None
    cache.put("a", IMAGE)
    assert cache.get("a") == IMAGE


def test_a_symbolic_link_is_not_followed(cache: ObjectCache, tmp_path: Path) -> None:
    cache.put("a", IMAGE)
    moved = tmp_path / "elsewhere.o"
    (cache.directory / "a.o").rename(moved)
    (cache.directory / "a.o").symlink_to(moved)
    assert cache.get("a") is None
    cache.put("a", IMAGE)
    assert cache.get("a") == IMAGE
    assert not (cache.directory / "a.o").is_symlink()


def test_a_directory_that_others_can_enter_is_not_used(cache: ObjectCache) -> None:
    cache.put("a", IMAGE)
    cache.directory.chmod(0o755)
    assert cache.get("a") is None
    assert not cache.usage().usable
    cache.put("b", IMAGE)
    assert not (cache.directory / "b.o").exists()


def test_a_linked_directory_is_not_used(tmp_path: Path) -> None:
    real = ObjectCache(tmp_path / "real")
    real.put("a", IMAGE)
    (tmp_path / "link").symlink_to(real.directory)
    assert ObjectCache(tmp_path / "link").get("a") is None


def test_a_directory_of_another_user_is_not_used(cache: ObjectCache, monkeypatch) -> None:
    cache.put("a", IMAGE)
    monkeypatch.setattr(os, "getuid", lambda: os.stat(cache.directory).st_uid + 1)
    assert cache.get("a") is None


def test_a_directory_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = ObjectCache(tmp_path / "file" / "kernels")
    cache.put("a", IMAGE)
    assert cache.get("a") is None
    assert cache.usage().files == 0


def test_a_full_disk_is_no_error_and_leaves_nothing(cache: ObjectCache, monkeypatch) -> None:
    cache.put("a", IMAGE)

    def no_space(*unused: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    cache.put("b", IMAGE)
    assert cache.get("b") is None
    assert [path.name for path in cache.directory.iterdir()] == ["a.o"]


def test_the_oldest_go_when_the_limit_is_reached(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "kernels", limit=3 * (len(IMAGE) + 64))
    for age, key in enumerate("abcd"):
        cache.put(key, IMAGE)
        path = cache.directory / f"{key}.o"
        if path.exists():
            os.utime(path, (1000 + age, 1000 + age))
    cache.put("e", IMAGE)
    assert cache.get("a") is None
    assert cache.get("e") == IMAGE
    assert cache.usage().size <= cache.limit


def _put_and_get(directory: Path) -> bool:
    cache = ObjectCache(directory)
    for _ in range(20):
        cache.put("a", IMAGE)
        if cache.get("a") not in (IMAGE, None):
            return False
    return cache.get("a") == IMAGE


def test_ten_processes_at_once(cache: ObjectCache) -> None:
    with multiprocessing.get_context("fork").Pool(10) as pool:
        assert all(pool.map(_put_and_get, [cache.directory] * 10))
    assert [path.name for path in cache.directory.iterdir()] == ["a.o"]


def test_the_key_depends_on_everything(monkeypatch) -> None:
    keys = {cache_key("a", "b"), cache_key("ab"), cache_key("a", "c"), cache_key("a")}
    monkeypatch.setattr(cache_module, "llvm_version", lambda: "0.0.0")
    keys.add(cache_key("a", "b"))
    monkeypatch.setattr(cache_module, "source_digest", lambda: "other")
    keys.add(cache_key("a", "b"))
    assert len(keys) == 6

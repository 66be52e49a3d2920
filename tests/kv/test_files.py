"""A sequence comes back from a file bit for bit, or not at all."""

from __future__ import annotations

import errno
import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import forks

from quire.errors import OutOfPages, QuireError, SequenceFileError
from quire.kv import Group, PagedKVCache, SequenceHandle, files

pytest.importorskip("safetensors")

SIZES: dict[str, Any] = {"heads": 2, "head_dim": 3, "value_dim": 5, "page_size": 4, "n_pages": 9}
GROUPS = [Group([0, 2]), Group([1], window=5)]


def made(**options: Any) -> PagedKVCache:
    return PagedKVCache(**{"groups": GROUPS, **SIZES, **options})


def filled(cache: PagedKVCache, *counts: int) -> SequenceHandle:
    sequence = cache.sequence()
    dtype = torch.float32 if cache.shape.dtype.itemsize == 1 else cache.shape.dtype
    for count in counts:
        widths = (cache.shape.head_dim, cache.shape.value_dim)[: len(cache.shape.sides)]
        tensors = [torch.randn(cache.num_layers, count, 2, n, dtype=dtype) for n in widths]
        cache.append([sequence], *tensors)
    return sequence


def assert_same(a: PagedKVCache, first: SequenceHandle, b: PagedKVCache, second: object) -> None:
    assert isinstance(second, SequenceHandle)
    assert a.length(first) == b.length(second)
    for layer in range(a.num_layers):
        one, other = a.dense(layer, first), b.dense(layer, second)
        assert one.start == other.start
        for mine, theirs in ((one.key, other.key), (one.value, other.value)):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("counts", [(), (1,), (4,), (9, 9, 1)])
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        *((dtype, None) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)),
        (torch.int8, None),
        (torch.float8_e4m3fn, None),
        (torch.float8_e5m2, False),
    ],
)
def test_what_is_saved_is_loaded(
    counts: tuple[int, ...], dtype: torch.dtype, scales: bool | None, tmp_path: Path
) -> None:
    cache, other = (made(dtype=dtype, scales=scales) for _ in range(2))
    sequence = filled(cache, *counts)
    cache.save(sequence, tmp_path / "a")
    loaded = other.load(tmp_path / "a")
    other.check_integrity()
    assert_same(cache, sequence, other, loaded)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("counts", [(), (4,), (9, 9, 1)])
def test_a_copy_outside_of_pages_is_restored(counts: tuple[int, ...]) -> None:
    cache, other = made(), made()
    sequence = filled(cache, *counts)
    copied = cache.copy_out(sequence)
    restored = other.restore(copied)
    assert_same(cache, sequence, other, restored)
    cache.free(sequence)
    filled(cache, 8)  # writes to the pages that were freed
    assert_same(other, restored, cache, cache.restore(copied))
    for each in (cache, other):
        each.check_integrity()
    for options in ({"groups": [Group([0, 1, 2])]}, {"page_size": 8}, {"heads": 4}):
        unlike = made(**options)
        if options != {"page_size": 8} or copied.header.starts[1] % 8:
            with pytest.raises(SequenceFileError, match="a copy must be of a cache like this one"):
                unlike.restore(copied)
            assert unlike.statistics().sequences == 0


def test_nan_and_signed_zeros_keep_their_bits(tmp_path: Path) -> None:
    cache = PagedKVCache(1, heads=1, head_dim=2, page_size=4, n_pages=2)
    sequence = cache.sequence()
    bits = torch.tensor([0x7FC00001, -0x80000000, 0x7F800000, -1], dtype=torch.int32)
    key = bits.view(torch.float32).view(1, 2, 1, 2)
    cache.append([sequence], key, key)
    cache.save(sequence, tmp_path / "a")
    assert_same(cache, sequence, cache, cache.load(tmp_path / "a"))


def test_another_page_size_will_do_without_a_window(tmp_path: Path) -> None:
    small = made(groups=None, layers=2)
    large = made(groups=None, layers=2, page_size=8)
    sequence = filled(small, 11)
    small.save(sequence, tmp_path / "a")
    assert_same(small, sequence, large, large.load(tmp_path / "a"))


def refused(cache: PagedKVCache, path: Path, message: str) -> None:
    before = cache.statistics()
    with pytest.raises(SequenceFileError, match=message):
        cache.load(path)
    assert cache.statistics() == before
    cache.check_integrity()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "its heads is 2, and that of this cache 3"),
        ({"head_dim": 4}, "its head_dim is 3, and that of this cache 4"),
        ({"value_dim": 4}, "its value_dim is 5"),
        ({"dtype": torch.bfloat16}, "its dtype is float32, and that of this cache bfloat16"),
        ({"groups": [Group([0, 1, 2])]}, "its layers is"),
        ({"groups": [Group([0, 2]), Group([1], window=6)]}, "its windows is"),
        ({"page_size": 16}, "begin at 12"),
    ],
)
def test_a_file_of_another_cache_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    cache = made()
    cache.save(filled(cache, 9, 9, 1), tmp_path / "a")
    refused(made(**options), tmp_path / "a", message)


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    cache = made(n_pages=20)
    cache.save(filled(cache, 70), tmp_path / "a")
    small = made()
    with pytest.raises(OutOfPages):
        small.load(tmp_path / "a")
    assert small.statistics().sequences == 0
    small.check_integrity()


def test_a_file_that_is_cut_off_or_changed_is_refused(tmp_path: Path) -> None:
    cache = made()
    path = tmp_path / "a"
    cache.save(filled(cache, 9), path)
    content, chance = path.read_bytes(), random.Random(0)
    for length in [0, 1, 8, 50, *(chance.randrange(len(content)) for _ in range(30))]:
        path.write_bytes(content[:length])
        refused(cache, path, "PagedKVCache.save has written")
    for _ in range(150):
        at, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
        path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
        refused(cache, path, "Save the sequence again")
    path.write_bytes(content + b"more")
    refused(cache, path, "PagedKVCache.save has written")
    path.write_bytes(content)
    cache.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"length": 10}, {"length": -1}, {"length": 2**60}, {"length": 9.0}, {"length": True},
        {"starts": [0, 4]}, {"starts": [0]}, {"starts": [0, -4]}, {"starts": [12, 0]},
        {"starts": 3}, {"version": 2}, {"more": 1}, {"layers": [[0, 1], [2]]},
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    """Even if whoever changed it has made a new digest."""
    cache = made()
    sequence = filled(cache, 9)
    header = files.Header.of(cache.shape, cache._groups, sequence.row, cache.length(sequence))
    tensors = {
        f"{name}.{layer}": getattr(cache.dense(layer, sequence), name)[0].transpose(0, 1)
        for layer in range(3)
        for name in ("key", "value")
    }
    files.save(tmp_path / "a", files.SavedSequence(header, tensors))
    cache.load(tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    written = json.loads(content[8 : 8 + length])
    text = json.dumps(json.loads(written["__metadata__"]["quire"]) | change)
    digest = files._digest(text, {name: each.contiguous() for name, each in tensors.items()})
    written["__metadata__"] = {"quire": text, "sha256": digest}
    head = json.dumps(written).encode()
    head += b" " * (-len(head) % 8)
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(head)) + head + content[8 + length :])
    refused(cache, tmp_path / "a", "for a cache like this one, but .* is not: ")


@pytest.mark.parametrize("depth", [300, 100_000])
def test_a_header_without_end_is_refused(depth: int, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    text = "[" * depth + "]" * depth
    save_file({"key.0": torch.zeros(3)}, tmp_path / "a", {"quire": text})
    refused(made(), tmp_path / "a", "other fields|recursion|Stack overflow")


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    cache = made()
    with pytest.raises(SequenceFileError, match=r"but '.*no/a'.* Make the directory"):
        cache.save(filled(cache, 3), tmp_path / "no" / "a")


def test_a_file_of_other_tensors_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(3)}, tmp_path / "a")
    refused(made(), tmp_path / "a", "it has no header")


CRASH = """
import os, sys, safetensors.torch, torch
from quire.kv import PagedKVCache, files

def dying(real):
    def call(*args, **kwargs):
        global calls_left
        calls_left -= 1
        if calls_left == 0:
            os._exit(9)
        return real(*args, **kwargs)
    return call

def made(tokens, number):
    sequence = cache.sequence()
    key = torch.full((1, tokens, 1, 1), number)
    cache.append([sequence], key, key)
    return sequence

cache = PagedKVCache(1, heads=1, head_dim=1, page_size=4, n_pages=9)
old, new = made(3, 1.0), made(5, 2.0)
code = 9
for stop_at in range(1, 20):
    cache.save(old, sys.argv[1])
    calls_left = stop_at
    if (child := os.fork()) == 0:
        safetensors.torch.save_file = dying(safetensors.torch.save_file)
        for name in ("open", "fsync", "close", "replace"):
            setattr(files.os, name, dying(getattr(os, name)))
        cache.save(new, sys.argv[1])
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    loaded = cache.load(sys.argv[1])
    print(code, cache.length(loaded), *cache.dense(0, loaded).key.unique().tolist())
    cache.free(loaded)
    if code == 0:
        break
"""


@forks
def test_a_crash_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", CRASH, tmp_path / "a"], check=True, capture_output=True, text=True
    )
    lines = run.stdout.splitlines()
    seen = list(dict.fromkeys(lines))
    assert seen == ["9 3 1.0", "9 5 2.0", "0 5 2.0"]
    assert len(lines) > 6


def test_a_failure_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("the disk is full")

    cache = made()
    monkeypatch.setattr(files.os, "replace", broken)
    with pytest.raises(OSError, match="full"):
        cache.save(filled(cache, 3), tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_what_windows_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories cannot be opened there, and what was opened for reading cannot be synced."""
    fcntl = pytest.importorskip("fcntl", reason="a system that tells how a file was opened")
    cache, path = made(), tmp_path / "a"
    real, synced = os.fsync, []

    def fsync(handle: int) -> None:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        synced.append(handle)
        real(handle)

    monkeypatch.setattr(files.os, "fsync", fsync)
    monkeypatch.setattr(files, "_is_windows", True)
    cache.save(filled(cache, 3), path)
    assert len(synced) == 1
    assert cache.length(cache.load(path)) == 3


def test_without_safetensors_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(QuireError, match=r"pip install 'quire\[kv\]'"):
        made().load("a")

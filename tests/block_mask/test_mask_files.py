"""Masks in files: they come back as they were, and nothing else comes out of a file."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mask_examples import allowed, block_masks, causal, from_cells, untraceable

import quire
from quire.block_mask import BlockMask, create_block_mask
from quire.block_mask import files as mask_files
from quire.errors import MaskFileError, MaskPickleError, QuireError, SlicedMaskError

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def saved(mask: BlockMask, path: Path) -> BlockMask:
    mask.save(path)
    return BlockMask.load(path)


# What comes back


@given(mask=block_masks())
def test_a_mask_comes_back(mask: BlockMask, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("masks") / "a.mask"
    if mask.mask_mod is untraceable:
        with pytest.raises(MaskPickleError):
            mask.save(path)
        assert list(path.parent.iterdir()) == []
        return
    back = saved(mask, path)
    assert type(back) is BlockMask
    assert back.equal(mask)
    assert (back.full_kv_num_blocks is None) == (mask.full_kv_num_blocks is None)
    assert torch.equal(allowed(back), allowed(mask))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (8,), (2, 3, 8), (0, 8)], ids=str)
def test_captured_tensors_come_back(dtype: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    table = torch.randint(0, 2, shape).to(dtype)

    def mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        at = {0: (), 1: (q_idx,), 2: (b, q_idx), 3: (b, h, q_idx)}[len(shape)]
        return (table[at] if at else q_idx * table) == kv_idx

    back = saved(from_cells([[1, 1]], mod, (8, 4)), tmp_path / "mask")
    (capture,) = back.mask_mod.captures  # type: ignore[attr-defined]
    assert capture.dtype == dtype
    assert torch.equal(capture, table)


def test_a_tensor_of_any_layout_comes_back(tmp_path: Path) -> None:
    table = torch.randn(4, 6, requires_grad=True)[:, ::2].T.expand(2, 3, 4)
    mod = lambda b, h, q_idx, kv_idx: table[b, h, q_idx] > 0  # noqa: E731
    back = saved(from_cells([[1, 1]], mod), tmp_path / "mask")
    (capture,) = back.mask_mod.captures  # type: ignore[attr-defined]
    assert torch.equal(capture, table)
    assert not capture.requires_grad


def test_attention_with_a_mask_from_a_file(tmp_path: Path) -> None:
    mask = BlockMask.from_lengths([70, 0, 130], causal=True)
    query, key, value = torch.randn(3, 1, 2, 200, 16).unbind(0)
    mask.save(str(tmp_path / "mask"))
    results = [
        quire.flex_attention(query, key, value, block_mask=each)
        for each in (mask, BlockMask.load(str(tmp_path / "mask"), device="cpu"))
    ]
    assert torch.equal(*results)


def test_a_slice_comes_back_as_a_slice(tmp_path: Path) -> None:
    back = saved(create_block_mask(causal, 1, 1, 300, 300, "cpu")[:, :, 1], tmp_path / "mask")
    assert back.is_sliced and back.seq_lengths == (128, 300)
    with pytest.raises(SlicedMaskError):
        back.resize(1, 1)


def test_masks_without_batches_come_back(tmp_path: Path) -> None:
    flat = BlockMask.from_kv_blocks(torch.tensor([1]), torch.tensor([[0]]))
    assert saved(flat, tmp_path / "mask").equal(flat)


def test_the_bytes_stay_the_same(tmp_path: Path) -> None:
    for name in "ab":
        BlockMask.from_lengths([3, 4]).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes().startswith(b"quire block mask 1\n")


# Writing


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mask"
    first, second = BlockMask.from_lengths([3]), BlockMask.from_lengths([4])
    first.save(path)
    mode = os.umask(0)
    os.umask(mode)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mode

    def fail(*args: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(mask_files.os, "replace", fail)
        with pytest.raises(OSError, match="disk is full"):
            second.save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert BlockMask.load(path).equal(first)
    second.save(path)
    assert BlockMask.load(path).equal(second)


def test_a_mod_that_has_no_graph_cannot_be_saved(tmp_path: Path) -> None:
    mask = create_block_mask(untraceable, None, None, 8, 8, "cpu")
    with pytest.raises(
        MaskPickleError,
        match=r"its graph is what is written, but 'untraceable' cannot.* Save .*create",
    ):
        mask.save(tmp_path / "mask")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        BlockMask.load(tmp_path / "mask")
    with pytest.raises(FileNotFoundError):
        BlockMask.from_lengths([3]).save(tmp_path / "none" / "mask")


# Damaged and hostile files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    table = torch.tensor([True, False] * 4)
    mod = lambda b, h, q_idx, kv_idx: table[q_idx] & (q_idx >= kv_idx)  # noqa: E731
    from_cells([[1, 0], [2, 1]], mod).save(tmp_path / "mask")
    return tmp_path / "mask"


def forge(path: Path, change: Any, arrays: Any = lambda data: data) -> None:
    """Rewrite the header and the arrays of a file, and make its digest right again."""
    content = path.read_bytes()
    body = content[len(b"quire block mask 1\n") + 32 :]
    end = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:end])
    changed = change(header) if callable(change) else change
    text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
    body = len(text).to_bytes(8, "little") + text + arrays(body[end:])
    path.write_bytes(b"quire block mask 1\n" + hashlib.sha256(body).digest() + body)


def with_field(name: str, value: Any) -> Any:
    return lambda header: {**header, name: value}


def test_forging_nothing_changes_nothing(path: Path) -> None:
    before = path.read_bytes()
    forge(path, lambda header: header)
    assert path.read_bytes() == before


@given(data=st.data())
def test_a_changed_byte_is_noticed(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("masks") / "mask"
    BlockMask.from_lengths([3, 4]).save(path)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(MaskFileError, match=r"a file that BlockMask\.save has written"):
        BlockMask.load(path)
    path.write_bytes(content[:place])
    with pytest.raises(MaskFileError):
        BlockMask.load(path)


def test_another_version_is_named(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"mask 1\n", b"mask 2\n", 1))
    with pytest.raises(MaskFileError, match="its version is b'2', and this quire reads 1"):
        BlockMask.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe\xfd", "decode"),
        (b"[" * 100_000, "recursion"),
        (b"9" * 5000, "digits|fields"),
        ([], "other fields"),
        ({}, "other fields"),
        (with_field("extra", 1), "other fields"),
        (with_field("seq_lengths", [8]), "not two numbers"),
        (with_field("seq_lengths", [8, True]), "not two numbers"),
        (with_field("seq_lengths", [8, -1]), "at least 0, but is -1"),
        (with_field("seq_lengths", [8, 2**70]), "larger than any"),
        (with_field("seq_lengths", [8, 9]), "do not fit its lengths"),
        (with_field("seq_lengths", [9, 8]), "do not fit its lengths"),
        (with_field("block_size", [0, 4]), "BLOCK_SIZE.0. must be a whole number of at least 1"),
        (with_field("block_size", "44"), "not two numbers"),
        (with_field("separate_full_blocks", 1), "not true or false"),
        (with_field("mask_mod", None), "captured tensors, but no mask_mod"),
        (with_field("mask_mod", {"name": "x"}), "mask_mod has other fields"),
        (with_field("mask_mod", {"name": 1, "graph": []}), "is not a string"),
        (with_field("mask_mod", {"name": "x", "graph": []}), "the graph has no rows"),
        (with_field("mask_mod", {"name": "x", "graph": [["exec", [], "bool", 1]]}), "no such op"),
        (with_field("arrays", []), "has no list of arrays"),
        (with_field("arrays", [["int8"]]), "not described by two"),
        (with_field("arrays", [["object", [1]]]), "an unknown dtype"),
        (with_field("arrays", [["int8", 4]]), "has no shape"),
        (with_field("arrays", [["int8", [2, -2]]]), "not a list of sizes"),
        (with_field("arrays", [["int8", [2**40, 2**40]]]), "too large"),
        (with_field("arrays", [["int8", [0, 2**40, 2**40]]]), "too large"),
        (with_field("arrays", [["int8", [1] * 65]]), "has no shape"),
        (with_field("arrays", [["int8", [2, 2]], ["bool", [9]]]), "not complete"),
        (with_field("arrays", [["int8", [2, 2]]]), "bytes after its arrays"),
        (with_field("arrays", [["int16", [2]], ["bool", [8]]]), "not a grid of int8"),
        (with_field("arrays", [["int8", [4]], ["bool", [8]]]), "not a grid of int8"),
        (with_field("arrays", [["int8", [2, 2]], ["bool", [2, 4]]]), "has 2 dimensions"),
        (
            lambda header: {
                **header,
                "seq_lengths": [8, 0],
                "arrays": [["int8", [2**50, 0]], ["int8", [12]]],
            },
            "empty grid",
        ),
    ],
)
def test_a_forged_header_is_refused(path: Path, change: Any, message: str) -> None:
    forge(path, change)
    with pytest.raises(MaskFileError, match=message) as caught:
        BlockMask.load(path)
    assert isinstance(caught.value, QuireError)
    assert "Save the mask again." in str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (lambda data: b"\x03" + data[1:], "not empty, partial or full"),
        (lambda data: b"\xff" + data[1:], "not empty, partial or full"),
        (lambda data: data[:-1] + b"\x07", "neither 0 nor 1"),
        (lambda data: data + b"\x00", "bytes after its arrays"),
    ],
)
def test_forged_arrays_are_refused(path: Path, arrays: Any, message: str) -> None:
    forge(path, lambda header: header, arrays)
    with pytest.raises(MaskFileError, match=message):
        BlockMask.load(path)


@given(junk=st.binary(max_size=200))
def test_junk_is_refused(junk: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("masks") / "mask"
    for content in (junk, b"quire block mask 1\n" + hashlib.sha256(junk).digest() + junk):
        path.write_bytes(content)
        with pytest.raises(MaskFileError):
            BlockMask.load(path)


def test_an_index_out_of_range_stays_an_error(path: Path) -> None:
    """Whatever a graph says, a read beyond a captured tensor is refused where it happens."""

    def shorten(header: Any) -> Any:
        return {**header, "arrays": [header["arrays"][0], ["bool", [2]]]}

    forge(path, shorten, lambda data: data[:6])
    mask, query = BlockMask.load(path), torch.randn(1, 1, 8, 8)
    with pytest.raises(IndexError, match="out of bounds"):
        quire.flex_attention(query, query, query, block_mask=mask)

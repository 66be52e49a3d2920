"""Block masks in files, without pickle: everything that is read is checked, and nothing is run.

    quire block mask 1\\n     the version
    32 bytes                 sha256 of all that follows
    8 bytes                  how long the header is, little-endian
    header                   JSON: lengths, block size, the graph of the mask_mod, dtypes and shapes
    arrays                   the cells and the captured tensors, little-endian, one after the other

A file is written under a temporary name and then renamed, so a reader sees the old mask or the new
one, and never a part of one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.block_mask.blocks import EMPTY, FULL, ceil_div
from quire.block_mask.checks import as_block_size, as_count
from quire.block_mask.mask_mods import sliced_mask_mod, traced_mod
from quire.block_mask.tensors import BlockTensors, Mask
from quire.checks.arguments import dtype_name
from quire.errors import MaskFileError, MissingFileError
from quire.ir.portable import DTYPE_NAMES, portable, restore
from quire.ir.trace import Traced
from quire.mods.compose import MaskMod

NAME, VERSION = b"quire block mask ", b"1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 64  # as in numpy
_MAX_EMPTY = 2**24  # the largest number of rows without columns, since they need no bytes in a file


def save(mask: BlockTensors, path: str | os.PathLike[str]) -> None:
    """Write a mask to one file: its blocks, and the graph and tensors of its mask_mod.

    The order of a backward pass on a GPU (`dq_*`) is not written.
    """
    mod = None if mask.is_sliced else traced_mod(mask.mask_mod, mask.device, "Save")
    tensors = [mask._cells().to(torch.int8), *(mod.captures if mod else ())]
    header = {
        "seq_lengths": mask.seq_lengths,
        "block_size": mask.BLOCK_SIZE,
        "separate_full_blocks": mask.separates_full_blocks,
        "mask_mod": mod and {"name": mod.name, "graph": portable(mod.output)},
        "arrays": [[dtype_name(tensor.dtype), list(tensor.shape)] for tensor in tensors],
    }
    text = json.dumps(header, allow_nan=False).encode()
    length = len(text).to_bytes(_LENGTH_BYTES, "little")
    body = b"".join([length, text, *map(_to_bytes, tensors)])
    try:
        _replace(Path(path), NAME + VERSION + hashlib.sha256(body).digest() + body)
    except (OSError, TypeError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise (MissingFileError if missing else MaskFileError)(
            f"path must be where a file can be written, but {str(path)!r} is not: {error}. Make "
            f"the directory, or free space."
        ) from error


def load(kind: type[Mask], path: str | os.PathLike[str]) -> Mask:
    """Read a mask, of the class `kind`, from a file."""
    try:
        return _read(kind, Path(path).read_bytes())
    except FileNotFoundError as error:
        raise MissingFileError(
            f"path must be a file that BlockMask.save has written, but there is no file "
            f"{str(path)!r}. Give the path that the mask was saved under."
        ) from error
    # Our own errors about masks are ValueErrors. A path of a wrong type raises TypeError.
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise MaskFileError(
            f"path must be a file that BlockMask.save has written, but {str(path)!r} is not: "
            f"{str(error).rstrip('.')}. Save the mask again."
        ) from error


def _replace(path: Path, content: bytes) -> None:
    """Write a file completely or not at all."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(draft, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError, ValueError):
            draft.unlink()
        raise


def _read(kind: type[Mask], content: bytes) -> Mask:
    _expect(content.startswith(NAME), "it does not start with the name of the format")
    version = content[len(NAME) :].partition(b"\n")[0][:20]
    _expect(version + b"\n" == VERSION, f"its version is {version!r}, and this quire reads 1")
    at = len(NAME + VERSION) + _DIGEST_BYTES
    body = memoryview(content)[at:]
    digest = hashlib.sha256(body).digest()
    _expect(content[at - _DIGEST_BYTES : at] == digest, "it is damaged, or not complete")
    end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    _expect(_LENGTH_BYTES <= len(body) >= end, "it is not complete")
    header = json.loads(bytes(body[_LENGTH_BYTES:end]))
    _expect(isinstance(header, dict) and header.keys() == _FIELDS, "its header has other fields")
    cells, *captures = _read_arrays(header["arrays"], body[end:])
    lengths, block_size = _pair(header["seq_lengths"]), as_block_size(_pair(header["block_size"]))
    _check_cells(cells, lengths, block_size)
    separate = header["separate_full_blocks"]
    _expect(type(separate) is bool, "separate_full_blocks is not true or false")
    return kind._from_cells(
        cells.to(torch.int32),
        separate_full_blocks=separate,
        BLOCK_SIZE=block_size,
        mask_mod=_read_mod(header["mask_mod"], captures),
        seq_lengths=lengths,
    )


_FIELDS = {"seq_lengths", "block_size", "separate_full_blocks", "mask_mod", "arrays"}


def _pair(value: object) -> tuple[int, int]:
    _expect(
        isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value),
        "the lengths or the block size are not two numbers",
    )
    first, second = (as_count("a length", each) for each in value)  # type: ignore[attr-defined]
    _expect(max(first, second) < 2**62, "a length is larger than any sequence")
    return first, second


def _check_cells(cells: Tensor, lengths: tuple[int, int], block_size: tuple[int, int]) -> None:
    _expect(cells.dtype == torch.int8 and cells.dim() >= 2, "its cells are not a grid of int8")
    held = math.prod(size for size in cells.shape if size)
    _expect(cells.numel() > 0 or held <= _MAX_EMPTY, "its cells are an empty grid of too many rows")
    num_rows, num_columns = cells.shape[-2:]
    enough = num_rows * block_size[0] >= lengths[0]
    exact = num_columns == ceil_div(lengths[1], block_size[1])
    _expect(enough and exact, "its cells do not fit its lengths")
    _expect(
        bool(((cells >= EMPTY) & (cells <= FULL)).all()), "a cell is not empty, partial or full"
    )


def _read_mod(written: object, captures: list[Tensor]) -> MaskMod:
    if written is None:
        _expect(not captures, "it has captured tensors, but no mask_mod")
        return sliced_mask_mod
    valid = isinstance(written, dict) and written.keys() == {"name", "graph"}
    _expect(valid, "its mask_mod has other fields")
    assert isinstance(written, dict)
    name, graph = written["name"], written["graph"]
    _expect(isinstance(name, str), "the name of its mask_mod is not a string")
    return Traced(restore(graph, captures), tuple(captures), "mask", name)


def _to_bytes(tensor: Tensor) -> bytes:
    size = tensor.dtype.itemsize
    plain = tensor.detach().cpu().resolve_neg().contiguous().view(_INTEGERS[size])
    return plain.numpy().astype(f"<i{size}", copy=False).tobytes()


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype by which elements of each size in bytes are written."""


def _read_arrays(described: object, content: memoryview) -> list[Tensor]:
    _expect(isinstance(described, list) and len(described) > 0, "it has no list of arrays")
    assert isinstance(described, list)
    tensors = []
    for entry in described:
        dtype, shape = _dtype_and_shape(entry)
        size = math.prod(shape) * dtype.itemsize
        _expect(size <= len(content), "an array is not complete")
        tensors.append(_from_bytes(content[:size], dtype, shape))
        content = content[size:]
    _expect(len(content) == 0, "there are bytes after its arrays")
    return tensors


def _dtype_and_shape(entry: Any) -> tuple[torch.dtype, list[int]]:
    _expect(isinstance(entry, list) and len(entry) == 2, "an array is not described by two values")
    name, shape = entry
    _expect(isinstance(name, str) and name in DTYPE_NAMES, "an array has an unknown dtype")
    _expect(isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS, "an array has no shape")
    _expect(
        all(type(size) is int and 0 <= size < 2**62 for size in shape),
        "a shape is not a list of sizes",
    )
    # An empty array may still have sizes whose product torch cannot represent.
    _expect(math.prod(size for size in shape if size) < 2**62, "an array is too large")
    return DTYPE_NAMES[name], shape


def _from_bytes(content: memoryview, dtype: torch.dtype, shape: list[int]) -> Tensor:
    size = dtype.itemsize
    numbers = np.frombuffer(content, f"<i{size}").astype(
        f"=i{size}"
    )  # a copy that can be written to
    if dtype == torch.bool:
        _expect(bool(((numbers == 0) | (numbers == 1)).all()), "a truth value is neither 0 nor 1")
    return torch.from_numpy(numbers).view(dtype).reshape(shape)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)

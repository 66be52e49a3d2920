"""A block mask in a file, without pickle: what is read is checked, and nothing of it is run.

    quire block mask 1\\n     the version
    32 bytes                 sha256 of all that follows
    8 bytes                  how long the header is, little-endian
    header                   JSON: lengths, block size, the graph of the mask_mod, dtypes and shapes
    arrays                   the cells and the captured tensors, little-endian, one after the other

A file is written beside its name and then renamed: whoever reads sees the old mask or the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from quire.block_mask.lists import EMPTY, FULL, as_block_size, as_count, ceil_div
from quire.block_mask.mask_mods import MaskMod, sliced_mask_mod, try_trace
from quire.errors import MaskFileError, MaskPickleError, MissingFileError, ModError
from quire.ir.portable import DTYPE_NAMES, dtype_name, portable, restore
from quire.ir.trace import Traced, mod_name

if TYPE_CHECKING:
    from quire.block_mask.mask import BlockMask

Mask = TypeVar("Mask", bound="BlockMask")

NAME, VERSION = b"quire block mask ", b"1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 64  # as in numpy
_MAX_EMPTY = 2**24  # how large a grid without columns may be, which takes no place in the file


def save(mask: BlockMask, path: str | os.PathLike[str]) -> None:
    """Write a mask to a file."""
    mod = None if mask.is_sliced else _traced(mask)
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
            f"expected a place that a file can be written to, got {str(path)!r}: {error}. Make "
            f"the directory, or free space."
        ) from error


def load(kind: type[Mask], path: str | os.PathLike[str]) -> Mask:
    """The mask, of the class `kind`, that was written to a file."""
    try:
        return _read(kind, Path(path).read_bytes())
    except FileNotFoundError as error:
        raise MissingFileError(
            f"expected a file that BlockMask.save has written, got {str(path)!r}, where there "
            f"is none. Give the path that the mask was saved under."
        ) from error
    # Our own errors about masks are ValueErrors; a TypeError is about a path that is none.
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise MaskFileError(
            f"expected a file that BlockMask.save has written, got {str(path)!r}: {error}. "
            f"Save the mask again."
        ) from error


def _traced(mask: BlockMask) -> Traced:
    traced = try_trace(mask.mask_mod, "mask", mask._cells().device)
    if isinstance(traced, ModError):
        raise MaskPickleError(
            f"expected a mask_mod that can be traced, since a file keeps its graph, got "
            f"{mod_name(mask.mask_mod)!r}, which cannot: {traced} Save the arguments of "
            f"create_block_mask and create the mask again."
        ) from traced
    return traced


def _replace(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all."""
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
    _expect(content.startswith(NAME), "it does not begin as such files do")
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
    _expect(type(separate) is bool, "separate_full_blocks is no truth value")
    return kind._from_cells(
        cells.to(torch.int32),
        separate,
        BLOCK_SIZE=block_size,
        mask_mod=_read_mod(header["mask_mod"], captures),
        seq_lengths=lengths,
    )


_FIELDS = {"seq_lengths", "block_size", "separate_full_blocks", "mask_mod", "arrays"}


def _pair(value: object) -> tuple[int, int]:
    _expect(
        isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value),
        "lengths or block size are no two numbers",
    )
    first, second = (as_count("a length", each) for each in value)  # type: ignore[attr-defined]
    _expect(max(first, second) < 2**62, "a length is larger than any sequence")
    return first, second


def _check_cells(cells: Tensor, lengths: tuple[int, int], block_size: tuple[int, int]) -> None:
    _expect(cells.dtype == torch.int8 and cells.dim() >= 2, "its cells are no grid")
    held = math.prod(size for size in cells.shape if size)
    _expect(cells.numel() > 0 or held <= _MAX_EMPTY, "its cells are an empty grid without end")
    num_rows, num_columns = cells.shape[-2:]
    enough = num_rows * block_size[0] >= lengths[0]
    exact = num_columns == ceil_div(lengths[1], block_size[1])
    _expect(enough and exact, "its cells are not those of its lengths")
    _expect(bool(((cells >= EMPTY) & (cells <= FULL)).all()), "a cell is none of the three kinds")


def _read_mod(written: object, captures: list[Tensor]) -> MaskMod:
    if written is None:
        _expect(not captures, "a slice captures nothing")
        return sliced_mask_mod
    valid = isinstance(written, dict) and written.keys() == {"name", "graph"}
    _expect(valid, "its mask_mod has other fields")
    assert isinstance(written, dict)
    name, graph = written["name"], written["graph"]
    _expect(isinstance(name, str), "the name of its mask_mod is no text")
    return Traced(restore(graph, captures), tuple(captures), "mask", name)


def _to_bytes(tensor: Tensor) -> bytes:
    size = tensor.dtype.itemsize
    plain = tensor.detach().cpu().resolve_neg().contiguous().view(_INTEGERS[size])
    return plain.numpy().astype(f"<i{size}", copy=False).tobytes()


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype whose bits a tensor is written as, by its size."""


def _read_arrays(described: object, content: memoryview) -> list[Tensor]:
    _expect(isinstance(described, list) and len(described) > 0, "it describes no arrays")
    assert isinstance(described, list)
    tensors = []
    for entry in described:
        dtype, shape = _dtype_and_shape(entry)
        size = math.prod(shape) * dtype.itemsize
        _expect(size <= len(content), "an array is not complete")
        tensors.append(_from_bytes(content[:size], dtype, shape))
        content = content[size:]
    _expect(len(content) == 0, "there is more in it than its arrays")
    return tensors


def _dtype_and_shape(entry: Any) -> tuple[torch.dtype, list[int]]:
    _expect(isinstance(entry, list) and len(entry) == 2, "an array is not described by two values")
    name, shape = entry
    _expect(isinstance(name, str) and name in DTYPE_NAMES, "an array has no dtype of ours")
    _expect(isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS, "an array has no shape")
    _expect(
        all(type(size) is int and 0 <= size < 2**62 for size in shape),
        "a shape is no list of sizes",
    )
    # Sizes beside a 0 could still be more than torch can count.
    _expect(math.prod(size for size in shape if size) < 2**62, "an array is too large")
    return DTYPE_NAMES[name], shape


def _from_bytes(content: memoryview, dtype: torch.dtype, shape: list[int]) -> Tensor:
    size = dtype.itemsize
    numbers = np.frombuffer(content, f"<i{size}").astype(f"=i{size}")  # a copy, and ours
    if dtype == torch.bool:
        _expect(bool(((numbers == 0) | (numbers == 1)).all()), "a truth value is neither 0 nor 1")
    return torch.from_numpy(numbers).view(dtype).reshape(shape)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)

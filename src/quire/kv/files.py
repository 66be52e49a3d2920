"""A sequence in a file: keys and values by layer, in the format of safetensors.

    key.0, value.0, key.1, ...   [rows, Hkv, D]: the rows that a layer holds, in their dtype
    key_scale.0, ...             [rows, Hkv]: the scales of rows of int8
    metadata "quire"             the header as JSON: lengths, and what the cache was made for
    metadata "sha256"            of the header and of all tensors

A file is written under another name and then renamed. So a reader sees the old sequence or the new
one, even if the machine stops in between. A file is checked before a cache uses any of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import MissingFileError, SequenceFileError

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype by size in bytes: tensors are hashed as integers."""

_is_windows = os.name == "nt"


@dataclass(frozen=True)
class Header:
    """The header of a file. Its lists have an entry for each group of layers."""

    length: int
    starts: list[int]  # the first position that is held
    layers: list[list[int]]
    windows: list[int | None]
    heads: int
    head_dim: int
    value_dim: int
    dtype: str
    version: int = 1

    def tensors(self) -> dict[str, tuple[list[int], str]]:
        """The shape and dtype of each tensor in the file."""
        parts = {"key": ([self.head_dim], self.dtype), "value": ([self.value_dim], self.dtype)}
        if self.dtype == "int8":
            parts |= {"key_scale": ([], "float32"), "value_scale": ([], "float32")}
        return {
            f"{part}.{layer}": ([self.length - start, self.heads, *row], dtype)
            for start, layers in zip(self.starts, self.layers, strict=True)
            for layer in layers
            for part, (row, dtype) in parts.items()
        }


def save(path: str | os.PathLike[str], header: Header, tensors: Mapping[str, Tensor]) -> None:
    """Write a file as a whole, or raise and leave no part of it behind."""
    safetensors = _library()
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    text = json.dumps(asdict(header))
    metadata = {"quire": text, "sha256": _digest(text, plain)}
    draft = None
    try:
        file = Path(path)
        draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
        safetensors.torch.save_file(plain, draft, metadata)
        _sync(draft)
        os.replace(draft, file)
        _sync(file.parent)
    except BaseException as error:
        if draft is not None:
            with contextlib.suppress(OSError, ValueError):
                draft.unlink()
        if isinstance(error, safetensors.SafetensorError | OSError | ValueError | TypeError):
            raise SequenceFileError(
                f"path must be a place for a file, but {str(path)!r} cannot be written: {error}. "
                f"Make the directory, or free space."
            ) from error
        raise


def load(path: str | os.PathLike[str], wanted: Header) -> tuple[Header, dict[str, Tensor]]:
    """Return the header and tensors of a file. Raise if it does not fit a cache like `wanted`.

    The length and the starts of `wanted` are not compared: `saved.plans` checks those of the file.
    """
    safetensors = _library()
    try:
        with safetensors.safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = _header(metadata.get("quire", ""))
        _expect_same(header, wanted)
        _expect_tensors(header, tensors)
        true = _digest(metadata["quire"], tensors)
        _expect(metadata.get("sha256") == true, "its content is not what was written")
    except FileNotFoundError as error:
        raise MissingFileError(
            f"path must be a file that PagedKVCache.save has written, but there is none at "
            f"{str(path)!r}. Give the path that the sequence was saved under, or compute it."
        ) from error
    except (safetensors.SafetensorError, OSError, *_MALFORMED) as error:
        raise SequenceFileError(
            f"path must be a file that PagedKVCache.save has written for a cache like this one, "
            f"but {str(path)!r} is not: {error}. Save the sequence again, or compute it."
        ) from error
    return header, tensors


_MALFORMED = (ValueError, TypeError, KeyError, RecursionError)


def _library() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise SequenceFileError(
            "the package safetensors, which writes sequences to files, must be installed, but is "
            "not. Run: pip install 'quire[kv]'."
        ) from error
    return safetensors


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().view(_INTEGERS[tensor.dtype.itemsize]).numpy().data)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file or directory is on the disk."""
    is_directory = path.is_dir()
    if is_directory and _is_windows:
        return  # Windows cannot open directories
    # Windows only syncs files that are open for writing.
    handle = os.open(path, os.O_RDONLY if is_directory else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _header(text: str) -> Header:
    _expect(text != "", "it has no header")
    written = json.loads(text)
    valid = isinstance(written, dict) and written.keys() == set(Header.__dataclass_fields__)
    _expect(valid, "its header has other fields")
    header = Header(**written)
    numbers = [header.length, *header.starts]
    _expect(all(type(number) is int for number in numbers), "a length is not a number")
    _expect(0 <= header.length < 2**48, "its length is out of range")
    _expect(
        all(0 <= start <= header.length for start in header.starts), "a start lies after the end"
    )
    return header


def _expect_same(header: Header, wanted: Header) -> None:
    alike = replace(wanted, length=header.length, starts=header.starts)
    ours = asdict(alike)
    for name, theirs in asdict(header).items():
        _expect(
            theirs == ours[name], f"its {name} is {theirs}, and that of this cache {ours[name]}"
        )
    _expect(len(header.starts) == len(wanted.starts), "it has a start too many or too few")


def _expect_tensors(header: Header, tensors: Mapping[str, Tensor]) -> None:
    wanted = header.tensors()
    _expect(wanted.keys() == tensors.keys(), "it has other tensors than its header says")
    for name, (shape, dtype) in wanted.items():
        tensor = tensors[name]
        _expect(list(tensor.shape) == shape, f"{name} has the shape {list(tensor.shape)}")
        _expect(str(tensor.dtype) == f"torch.{dtype}", f"{name} is of {tensor.dtype}")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)

"""A sequence in a file: keys and values by layer, in the format of safetensors.

    key.0, value.0, key.1, ...   [rows, Hkv, D]: the rows that a layer holds, in their dtype
    key_scale.0, ...             [rows, Hkv]: the scales of rows of int8
    metadata "quire"             the header as JSON: lengths, and what the cache was made for
    metadata "sha256"            of the header and of all tensors

A file is written beside its name and then renamed: whoever reads sees the old sequence or the new
one, also if the machine stops in between. What is read is checked before a cache sees any of it.
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
"""The dtype whose bits are hashed, by size."""


_is_windows = os.name == "nt"


@dataclass(frozen=True)
class Header:
    """What a file says of itself; lists have an entry for each group of layers."""

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
        """Shape and dtype of the tensors that belong to it."""
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
    """Write a file that is there as a whole or not at all."""
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
                f"expected a place that a file can be written to, got {str(path)!r}: "
                f"{error}. Make the directory, or free space."
            ) from error
        raise


def load(path: str | os.PathLike[str], wanted: Header) -> tuple[Header, dict[str, Tensor]]:
    """The header and tensors of a file, if a cache can take it that describes itself as `wanted`.

    Lengths and starts are the file's own; whether pages can begin there the cache has to say.
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
            f"expected a file that PagedKVCache.save has written, got {str(path)!r}, where "
            f"there is none. Give the path that the sequence was saved under, or compute it."
        ) from error
    except (safetensors.SafetensorError, OSError, *_MALFORMED) as error:
        raise SequenceFileError(
            f"expected a file that PagedKVCache.save has written, for a cache like this one, got "
            f"{str(path)!r}: {error}. Save the sequence again, or compute it."
        ) from error
    return header, tensors


_MALFORMED = (ValueError, TypeError, KeyError, RecursionError)


def _library() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise SequenceFileError(
            "expected the package safetensors, which writes sequences to files, got none. Install "
            "it: pip install 'quire[kv]'."
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
    """Have what was written on the disk, not on its way there."""
    is_directory = path.is_dir()
    if is_directory and _is_windows:
        return  # where directories cannot be opened
    handle = os.open(
        path, os.O_RDONLY if is_directory else os.O_RDWR
    )  # Windows asks for the latter
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _header(text: str) -> Header:
    _expect(text != "", "it does not say that it is one")
    written = json.loads(text)
    valid = isinstance(written, dict) and written.keys() == set(Header.__dataclass_fields__)
    _expect(valid, "its header has other fields")
    header = Header(**written)
    numbers = [header.length, *header.starts]
    _expect(all(type(number) is int for number in numbers), "a length is no number")
    _expect(0 <= header.length < 2**48, "its length is none")
    _expect(all(0 <= start <= header.length for start in header.starts), "a start lies outside")
    return header


def _expect_same(header: Header, wanted: Header) -> None:
    alike = replace(wanted, length=header.length, starts=header.starts)
    for (name, got), expected in zip(asdict(header).items(), asdict(alike).values(), strict=True):
        _expect(got == expected, f"its {name} is {got}, and that of this cache {expected}")
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

"""A sequence outside of pages: a copy in memory, or a file in the format of safetensors.

    key.0, value.0, key.1, ...   [rows, Hkv, D]: the rows that a layer holds, in their dtype
    key_scale.0, ...             [rows, Hkv]: the scales of rows, if they have any
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.checks.arguments import dtype_name
from quire.errors import MissingFileError, SequenceFileError
from quire.kv.groups import LayerGroup
from quire.kv.pages import LayerPages, PageShape
from quire.kv.table import PagePlan

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

    @classmethod
    def of(
        cls, shape: PageShape, groups: Sequence[LayerGroup], row: int | None = None, length: int = 0
    ) -> Header:
        """Return the header for the sequence in `row`, by default for one without tokens."""
        tables = [group.table for group in groups]
        return cls(
            length=length,
            starts=[0 if row is None else table.start(row) for table in tables],
            layers=[list(group.layers) for group in groups],
            windows=[table.window for table in tables],
            heads=shape.heads,
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            dtype=dtype_name(shape.dtype),
        )


class SavedSequence(NamedTuple):
    """A copy of what a sequence holds, outside of pages."""

    header: Header
    tensors: dict[str, Tensor]


def rows_of(groups: Sequence[LayerGroup], row: int, length: int) -> dict[str, Tensor]:
    """Return the rows of a sequence in every layer, in the dtype of pages: key.0, value.0, ..."""
    tensors: dict[str, Tensor] = {}
    for layer, pages, slots in _layers(groups, row, length):
        tensors |= {f"{part}.{layer}": each for part, each in pages.read(slots).items()}
    return tensors


def plans_of(header: Header, shape: PageShape, groups: Sequence[LayerGroup]) -> list[PagePlan]:
    """Return the pages that a copy needs in each group. Raise if the cache is unlike its own."""
    own = replace(Header.of(shape, groups), length=header.length, starts=header.starts)
    size = shape.page_size
    fits = header == own and all(
        start % size == 0 and start <= group.table.reach(header.length) * size
        for group, start in zip(groups, header.starts, strict=True)
    )
    if not fits:
        raise SequenceFileError(
            f"a copy must be of a cache like this one, {own}, but is {header}. Restore it where "
            f"pages, layers and windows have the same sizes."
        )
    return [
        group.table.plan_new(start, header.length)
        for group, start in zip(groups, header.starts, strict=True)
    ]


def place(groups: Sequence[LayerGroup], row: int, saved: SavedSequence) -> None:
    """Write what `rows_of` has returned to the pages of another sequence."""
    for layer, pages, slots in _layers(groups, row, saved.header.length):
        pages.place(slots, {part: saved.tensors[f"{part}.{layer}"] for part in pages.shape.parts})


def _layers(
    groups: Sequence[LayerGroup], row: int, length: int
) -> Iterator[tuple[int, LayerPages, Tensor]]:
    """Yield each layer with its pages, and the slots of a sequence in them."""
    for group in groups:
        slots = group.held_slots(row, length)
        for layer, pages in group.layers.items():
            yield layer, pages, slots


def save(path: str | os.PathLike[str], saved: SavedSequence) -> None:
    """Write a file as a whole, or raise and leave no part of it behind."""
    safetensors = _library()
    header, tensors = saved
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


def load(
    path: str | os.PathLike[str], shape: PageShape, groups: Sequence[LayerGroup]
) -> SavedSequence:
    """Return the header and tensors of a file. Raise if a cache of these groups cannot hold it."""
    safetensors = _library()
    try:
        with safetensors.safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = _header(metadata.get("quire", ""), Header.of(shape, groups))
        _expect_tensors(header, shape, tensors)
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
    for group, start in zip(groups, header.starts, strict=True):
        size, table = shape.page_size, group.table
        if start % size or start > table.reach(header.length) * size:
            raise SequenceFileError(
                f"the rows of a file must begin with a page of {size} and reach back as far as the "
                f"window of {table.window}, but those of {os.fspath(path)!r} begin at {start}. "
                f"Load it into a cache with the page size that it was saved from."
            )
    return SavedSequence(header, tensors)


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
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
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


def _header(text: str, wanted: Header) -> Header:
    """Return the header of a file. It must be like `wanted`, but for the length and the starts."""
    _expect(text != "", "it has no header")
    written = json.loads(text)
    valid = isinstance(written, dict) and written.keys() == set(Header.__dataclass_fields__)
    _expect(valid, "its header has other fields")
    length, starts = written["length"], written["starts"]
    _expect(all(type(number) is int for number in [length, *starts]), "a length is not a number")
    _expect(0 <= length < 2**48, "its length is out of range")
    _expect(all(0 <= start <= length for start in starts), "a start lies after the end")
    header = replace(wanted, length=length, starts=starts)
    for name, ours in asdict(header).items():
        theirs = written[name]
        _expect(theirs == ours, f"its {name} is {theirs}, and that of this cache {ours}")
    _expect(len(starts) == len(wanted.starts), "it has a start too many or too few")
    return header


def _expect_tensors(header: Header, shape: PageShape, tensors: Mapping[str, Tensor]) -> None:
    wanted = {
        f"{part}.{layer}": ([header.length - start, header.heads, *row], dtype)
        for start, layers in zip(header.starts, header.layers, strict=True)
        for layer in layers
        for part, (row, dtype) in shape.parts.items()
    }
    _expect(wanted.keys() == tensors.keys(), "it has other tensors than its header says")
    for name, (sizes, dtype) in wanted.items():
        tensor = tensors[name]
        _expect(list(tensor.shape) == sizes, f"{name} has the shape {list(tensor.shape)}")
        _expect(tensor.dtype == dtype, f"{name} is of {tensor.dtype}")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)

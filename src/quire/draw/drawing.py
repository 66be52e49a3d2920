"""`draw`: check what came, and hand it to whoever writes text or a picture."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention import flex_attention as torch_flex

from quire.block_mask import NOOP_BLOCK_SIZE, BlockMask
from quire.block_mask.lists import as_block_size, as_count
from quire.block_mask.mask_mods import REFUSED, try_trace
from quire.draw.png import write_png
from quire.draw.sheet import Picture, Sheet
from quire.draw.subject import Blocks, Elements, Pair, Subject, TracedMask
from quire.draw.svg import write_svg
from quire.draw.text import LEAST_WIDTH, write_text
from quire.errors import ArgumentError, ModSignatureError
from quire.ir.trace import Mod, Traced, mod_kind, mod_name

DEFAULT_WIDTH = 80
ELEMENTS_UP_TO = 128  # tokens; longer masks are drawn in blocks

_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Drawing:
    """A mask that has been looked at: text when it is printed, a picture when it is saved."""

    subject: Subject
    width: int = DEFAULT_WIDTH

    def __str__(self) -> str:
        return write_text(self.subject, self.width)

    __repr__ = __str__

    def svg(self) -> str:
        """The picture as SVG."""
        return write_svg(Sheet(self.subject))

    def png(self) -> bytes:
        """The picture as PNG."""
        return write_png(Sheet(self.subject))

    def _repr_png_(self) -> bytes:
        """What a notebook shows."""
        return self.png()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file whose name ends in .png or .svg."""
        save_picture(Sheet(self.subject), path, "mask")


def save_picture(picture: Picture, path: str | os.PathLike[str], name: str) -> None:
    """Write a picture to a file whose name ends in .png or .svg."""
    match (file := Path(path)).suffix.lower():
        case ".png":
            file.write_bytes(write_png(picture))
        case ".svg":
            file.write_text(write_svg(picture), encoding="utf-8")
        case _:
            raise ArgumentError(
                f"expected a path that ends in .png or .svg, got {os.fspath(path)!r}. "
                f"Name the file {name}.png or {name}.svg."
            )


def draw(
    mask: Mod | torch_flex.BlockMask,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    b: int = 0,
    h: int = 0,
    block_size: int | tuple[int, int] = 128,
    path: str | os.PathLike[str] | None = None,
    width: int = DEFAULT_WIDTH,
) -> Drawing:
    """A mask_mod or a block mask as text, or with a `path` as a picture as well.

    >>> quire.draw(quire.mods.sliding_window(2), 6)
    sliding_window_2: 6 queries x 6 keys, sparsity 58.3 %
      0   2   4
    0 ██· · · · ·
      ████· · · ·
    2 ██████· · ·
      · ██████· ·
    4 · · ██████·
      · · · ██████
    ██ seen  · hidden

    Up to 128 tokens it shows elements, beyond that blocks: full where every query sees every key,
    partial where some do, empty where none does. A cell of the drawing holds several blocks if
    there are too many. `kv_len` is `q_len` unless given. A block mask is drawn as it is, with the
    lengths and the blocks that it has. `width` is that of the text, in columns.
    """
    lengths, at = (q_len, kv_len), (as_count("b", b), as_count("h", h))
    if as_count("width", width) < LEAST_WIDTH:
        raise ArgumentError(
            f"expected a width of at least {LEAST_WIDTH} columns, got {width}. The default is "
            f"{DEFAULT_WIDTH}."
        )
    if isinstance(mask, torch_flex.BlockMask):
        subject = _of_blocks(BlockMask.from_torch(mask), lengths, at)
    else:
        subject = _of_mod(mask, lengths, at, as_block_size(block_size))
    drawing = Drawing(subject, width)
    if path is not None:
        drawing.save(path)
    return drawing


def _of_mod(mod: Mod, lengths: tuple[int | None, int | None], at: Pair, block: Pair) -> Subject:
    if mod_kind(mod) != "mask":
        raise ModSignatureError(
            f"draw requires a mask_mod(b, h, q_idx, kv_idx) or a block mask, got "
            f"{mod_name(mod)!r}, which has the arguments of a score_mod. quire.why shows what that "
            f"does to a score."
        )
    q_len, kv_len = lengths
    if q_len is None:
        raise ArgumentError(
            f"expected the number of tokens for the mask_mod {mod_name(mod)!r}, got none. Give "
            f"q_len, and kv_len if it differs."
        )
    kv_len = q_len if kv_len is None else kv_len
    size = as_count("q_len", q_len, 1), as_count("kv_len", kv_len, 1)
    traced = try_trace(mod, "mask", _CPU)
    if isinstance(traced, REFUSED):
        raise traced  # torch could not run it either
    cell = (1, 1) if max(size) <= ELEMENTS_UP_TO else block
    if isinstance(traced, Traced):
        return TracedMask(mod_name(mod), size, cell, block, traced, at)
    return Elements(mod_name(mod), size, cell, block, mod, at, traced)


def _of_blocks(mask: BlockMask, lengths: tuple[int | None, int | None], at: Pair) -> Subject:
    own = mask.seq_lengths
    asked = tuple(
        each if given is None else given for given, each in zip(lengths, own, strict=True)
    )
    if asked != own and mask.BLOCK_SIZE != (NOOP_BLOCK_SIZE, NOOP_BLOCK_SIZE):
        raise ArgumentError(
            f"expected the lengths that the block mask was made for, {own}, got {asked}. Leave "
            f"q_len and kv_len out."
        )
    size = as_count("q_len", asked[0]), as_count("kv_len", asked[1])
    if 0 in size:
        raise ArgumentError(
            f"expected a block mask with queries and keys, got one of lengths {size}. There is "
            f"nothing to draw."
        )
    rows = mask.rows(*size)
    for name, index, count in zip("bh", at, rows.runs.shape, strict=False):
        if index >= count > 1:
            raise ArgumentError(
                f"expected {name} below {count}, which the block mask was made for, got {index}. "
                f"Choose one that it has."
            )
    return Blocks(mod_name(mask.mask_mod), size, rows.block_size, rows.block_size, rows.runs, at)

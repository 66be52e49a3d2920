"""`draw`: check what came, and hand it to whoever writes text or a picture."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import flex_attention as torch_flex

from quire.block_mask import NOOP_BLOCK_SIZE, BlockMask
from quire.block_mask.lists import as_block_size, as_count
from quire.block_mask.mask_mods import REFUSED, try_trace
from quire.checks import check_score
from quire.draw.scores import ScoreMap
from quire.draw.subject import Blocks, Elements, Pair, Subject, TracedMask
from quire.draw.text import LEAST_WIDTH, write_mask, write_scores
from quire.errors import ArgumentError, MissingPackageError, ModError
from quire.ir.trace import Mod, Traced, mod_kind, mod_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_WIDTH = 80
ELEMENTS_UP_TO = 128  # tokens; longer masks are drawn in blocks

_CPU = torch.device("cpu")


class Drawing:
    """Something that has been looked at: text when it is printed, a picture when it is saved.

    Text needs nothing. Pictures need matplotlib, which is imported when one is asked for.
    """

    def __str__(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self)

    def svg(self) -> str:
        """The picture as SVG."""
        return self._picture("svg").decode()

    def png(self) -> bytes:
        """The picture as PNG."""
        return self._picture("png")

    def _repr_png_(self) -> bytes | None:
        """What a notebook shows; the text, where there is no matplotlib."""
        try:
            return self.png()
        except MissingPackageError:
            return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file whose name ends in .png or .svg."""
        kind = (file := Path(path)).suffix.lower().removeprefix(".")
        if kind not in ("png", "svg"):
            raise ArgumentError(
                f"expected a path that ends in .png or .svg, got {os.fspath(path)!r}. "
                f"Name the file {file.stem}.png or {file.stem}.svg."
            )
        file.write_bytes(self._picture(kind))

    def _picture(self, kind: str) -> bytes:
        from quire.draw.picture import rendered

        return rendered(self._figure, kind)

    def _figure(self) -> Figure:
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False)
class MaskDrawing(Drawing):
    """A mask."""

    subject: Subject
    width: int

    def __str__(self) -> str:
        return write_mask(self.subject, self.width)

    def _figure(self) -> Figure:
        from quire.draw.picture import mask_figure

        return mask_figure(self.subject)


@dataclass(frozen=True, eq=False, repr=False)
class ScoreDrawing(Drawing):
    """A score mod as a heat map."""

    scores: ScoreMap
    width: int

    def __str__(self) -> str:
        return write_scores(self.scores, self.width)

    def _figure(self) -> Figure:
        from quire.draw.picture import score_figure

        return score_figure(self.scores)


def draw(
    mask: Mod | torch_flex.BlockMask,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    b: int = 0,
    h: int = 0,
    score: float = 0.0,
    block_size: int | tuple[int, int] = 128,
    path: str | os.PathLike[str] | None = None,
    width: int = DEFAULT_WIDTH,
) -> Drawing:
    """A mask_mod, a block mask or a score_mod as text, or with a `path` as a picture as well.

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

    A score_mod, which has five parameters, is drawn as a heat map of what it makes of `score`, at
    one element of each cell where there are too many to show all. It has no blocks.
    """
    lengths, at = (q_len, kv_len), (as_count("b", b), as_count("h", h))
    if as_count("width", width) < LEAST_WIDTH:
        raise ArgumentError(
            f"expected a width of at least {LEAST_WIDTH} columns, got {width}. The default is "
            f"{DEFAULT_WIDTH}."
        )
    drawing: Drawing
    if isinstance(mask, torch_flex.BlockMask):
        drawing = MaskDrawing(_of_blocks(BlockMask.from_torch(mask), lengths, at), width)
    elif mod_kind(mask) == "mask":
        drawing = MaskDrawing(_of_mask_mod(mask, lengths, at, as_block_size(block_size)), width)
    else:
        drawing = ScoreDrawing(_of_score_mod(mask, lengths, at, check_score(score)), width)
    if path is not None:
        drawing.save(path)
    return drawing


def _of_mask_mod(
    mod: Mod, lengths: tuple[int | None, int | None], at: Pair, block: Pair
) -> Subject:
    size = _lengths(mod, lengths)
    traced = _traced(mod)
    cell = (1, 1) if max(size) <= ELEMENTS_UP_TO else block
    if isinstance(traced, Traced):
        return TracedMask(mod_name(mod), size, cell, block, traced, at)
    return Elements(mod_name(mod), size, cell, block, mod, at, traced)


def _of_score_mod(
    mod: Mod, lengths: tuple[int | None, int | None], at: Pair, score: float
) -> ScoreMap:
    size = _lengths(mod, lengths)
    traced = _traced(mod)
    evaluated = traced if isinstance(traced, Traced) else mod  # which torch.vmap runs
    return ScoreMap(mod_name(mod), size, evaluated, at, score)


def _lengths(mod: Mod, lengths: tuple[int | None, int | None]) -> Pair:
    q_len, kv_len = lengths
    if q_len is None:
        raise ArgumentError(
            f"expected the number of tokens for the {mod_kind(mod)}_mod {mod_name(mod)!r}, got "
            f"none. Give q_len, and kv_len if it differs."
        )
    kv_len = q_len if kv_len is None else kv_len
    return as_count("q_len", q_len, 1), as_count("kv_len", kv_len, 1)


def _traced(mod: Mod) -> Traced | ModError:
    """Its graph, or why it has none that torch could do without."""
    traced = try_trace(mod, mod_kind(mod), _CPU)
    if isinstance(traced, REFUSED):
        raise traced  # torch could not run it either
    return traced


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

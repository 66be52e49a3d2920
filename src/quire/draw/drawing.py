"""`draw`: check the arguments, and return a drawing that can be printed or saved."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.block_mask import BlockMask
from quire.block_mask.checks import as_block_size, as_count
from quire.block_mask.mask_mods import REFUSED, try_trace
from quire.checks import check_score
from quire.distributed import ContextPlan
from quire.draw.base import Drawing
from quire.draw.plans import PlanDrawing
from quire.draw.scores import HeatMap, ScoreMap, WeightMap
from quire.draw.subject import MOST_ELEMENTS, ListedMask, Subject, TracedMask, runs_of
from quire.draw.survey import Pair
from quire.draw.text import LEAST_WIDTH, write_mask, write_scores
from quire.errors import ArgumentError, ModError
from quire.ir.trace import Mod, Traced, mod_kind, mod_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_WIDTH = 80
ELEMENTS_UP_TO = 128  # tokens; longer masks are drawn in blocks

_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False, repr=False)
class MaskDrawing(Drawing):
    """A drawing of a mask."""

    subject: Subject
    width: int

    def __str__(self) -> str:
        return write_mask(self.subject, self.width)

    def _figure(self) -> Figure:
        from quire.draw.picture import mask_figure

        return mask_figure(self.subject)


@dataclass(frozen=True, eq=False, repr=False)
class ScoreDrawing(Drawing):
    """A drawing of a score mod, or of attention weights, as a heat map."""

    scores: HeatMap
    width: int

    def __str__(self) -> str:
        return write_scores(self.scores, self.width)

    def _figure(self) -> Figure:
        from quire.draw.picture import score_figure

        return score_figure(self.scores)


def draw(
    mask: Mod | torch_flex.BlockMask | ContextPlan | Tensor,
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
    """Draw a mask_mod, a block mask, a score_mod or a plan as text, and with `path` as a picture.

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

    Up to 128 tokens it shows elements, for more tokens blocks. A block is full if every query sees
    every key, partial if some do, and empty if none does. If there are too many blocks, a cell of
    the drawing shows several. `kv_len` is `q_len` by default. A block mask is drawn with its own
    lengths and blocks. `width` is the width of the text in columns.

    A score_mod, which has five parameters, is drawn as a heat map of the scores that it returns for
    `score`. If there are too many elements, each cell shows one of them. If `mask` is a tensor of
    attention weights [B, Hq, rows, S], as `AuxOutput.weights`, it is a heat map, too, in which a
    cell shows the largest. A plan of
    `quire.distributed` is drawn with its own lengths: which blocks each rank has and receives.
    """
    lengths, at = (q_len, kv_len), (as_count("b", b), as_count("h", h))
    if as_count("width", width) < LEAST_WIDTH:
        raise ArgumentError(
            f"width must be at least {LEAST_WIDTH} columns, but is {width}. Leave it out for the "
            f"default of {DEFAULT_WIDTH}."
        )
    drawing: Drawing
    if isinstance(mask, ContextPlan):
        drawing = PlanDrawing(mask, width)
    elif isinstance(mask, torch_flex.BlockMask):
        drawing = MaskDrawing(_of_blocks(BlockMask.from_torch(mask), lengths, at), width)
    elif isinstance(mask, Tensor):
        drawing = ScoreDrawing(_of_weights(mask, at), width)
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
    size, name = _lengths(mod, lengths), mod_name(mod)
    traced, count = _traced(mod), size[0] * size[1]
    cell = (1, 1) if max(size) <= ELEMENTS_UP_TO else block
    place = {"lengths": size, "block": cell, "outline": block, "at": at}
    if isinstance(traced, Traced):
        return TracedMask(name, **place, mask=traced)
    if count > MOST_ELEMENTS:
        raise ArgumentError(
            f"a mask_mod that cannot be traced must have at most {MOST_ELEMENTS:,} elements, but "
            f"{name!r} has {count:,}: {traced} Draw fewer tokens, or write the mask so that it can "
            f"be traced."
        ) from traced
    return ListedMask(name, **place, runs=runs_of(mod, name, at, lengths=size, block=cell))


def _of_score_mod(
    mod: Mod, lengths: tuple[int | None, int | None], at: Pair, score: float
) -> ScoreMap:
    size = _lengths(mod, lengths)
    traced = _traced(mod)
    evaluated = traced if isinstance(traced, Traced) else mod  # torch.vmap runs it
    return ScoreMap(mod_name(mod), size, score, evaluated, at)


def _of_weights(weights: Tensor, at: Pair) -> WeightMap:
    """Return the weights of one batch entry and head as a heat map."""
    if weights.dim() not in (2, 4) or 0 in weights.shape or not weights.is_floating_point():
        raise ArgumentError(
            f"weights must be [rows, S], or [B, Hq, rows, S] with b and h, but are "
            f"{list(weights.shape)} of {weights.dtype}. Give those of AuxOutput.weights."
        )
    index = at if weights.dim() == 4 else ()
    if any(each >= size for each, size in zip(index, weights.shape, strict=False)):
        raise ArgumentError(
            f"b and h must be below the sizes of the weights, {list(weights.shape)}, but are "
            f"{at[0]} and {at[1]}. Choose ones that they have."
        )
    shown = weights[index]
    return WeightMap("weights", (shown.shape[0], shown.shape[1]), 0.0, shown)


def _lengths(mod: Mod, lengths: tuple[int | None, int | None]) -> Pair:
    q_len, kv_len = lengths
    if q_len is None:
        raise ArgumentError(
            f"q_len must be given for the {mod_kind(mod)}_mod {mod_name(mod)!r}, but is None. Give "
            f"the number of queries, and kv_len if it differs."
        )
    kv_len = q_len if kv_len is None else kv_len
    return as_count("q_len", q_len, 1), as_count("kv_len", kv_len, 1)


def _traced(mod: Mod) -> Traced | ModError:
    """Return the graph of a mod, or the reason why it has none but torch may still run it."""
    traced = try_trace(mod, mod_kind(mod), _CPU)
    if isinstance(traced, REFUSED):
        raise traced  # torch cannot run it either
    return traced


def _of_blocks(mask: BlockMask, lengths: tuple[int | None, int | None], at: Pair) -> Subject:
    own = mask.seq_lengths
    asked = tuple(
        each if given is None else given for given, each in zip(lengths, own, strict=True)
    )
    if asked != own and not mask.is_endless:
        raise ArgumentError(
            f"q_len and kv_len must be the lengths of the block mask, {own}, but are {asked}. "
            f"Leave them out."
        )
    size = as_count("q_len", asked[0]), as_count("kv_len", asked[1])
    if 0 in size:
        raise ArgumentError(
            f"a block mask must have queries and keys to be drawn, but has lengths {size}. Draw "
            f"one that is not empty."
        )
    rows = mask.rows(*size)
    for name, index, count in zip("bh", at, rows.runs.shape, strict=False):
        if index >= count > 1:
            raise ArgumentError(
                f"{name} must be below {count}, as the block mask has {count}, but is {index}. "
                f"Choose one that it has."
            )
    place = {"lengths": size, "block": rows.block_size, "outline": rows.block_size, "at": at}
    return ListedMask(mod_name(mask.mask_mod), **place, runs=rows.runs)

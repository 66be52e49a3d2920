"""Masks of one sequence: which keys a query sees, by their positions.

Each mask compares `q_idx` and `kv_idx` with numbers or with entries of small tensors. No mask
computes a table [L, S] in advance.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.checks.arguments import lengths_tensor, prefix_number, tensor_of, whole_number
from quire.errors import ShapeError
from quire.mods.compose import Mask


@Mask
def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Let a query see itself and every position before it.

    causal:

        1 0 0 0 0
        1 1 0 0 0
        1 1 1 0 0
        1 1 1 1 0
        1 1 1 1 1
    """
    return kv_idx <= q_idx


def sliding_window(window_size: int) -> Mask:
    """Let a query see itself and the `window_size` positions before it.

    sliding_window(2):

        1 0 0 0 0 0
        1 1 0 0 0 0
        1 1 1 0 0 0
        0 1 1 1 0 0
        0 0 1 1 1 0
        0 0 0 1 1 1

    As in attention-gym, `window_size` does not count the query itself. If the configuration of a
    model says that a query sees n keys including itself, give n - 1.
    """
    window_size = _window(window_size)
    return Mask(_sliding_window, f"sliding_window_{window_size}", window_size=window_size)


def _sliding_window(
    b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, window_size: int
) -> Tensor:
    return (kv_idx <= q_idx) & (q_idx - kv_idx <= window_size)


def dilated_sliding_window(window_size: int, dilation: int) -> Mask:
    """Let a query see every `dilation`-th position on both sides, up to `window_size` away.

    dilated_sliding_window(4, 2):

        1 0 1 0 1 0 0 0
        0 1 0 1 0 1 0 0
        1 0 1 0 1 0 1 0
        0 1 0 1 0 1 0 1
        1 0 1 0 1 0 1 0
        0 1 0 1 0 1 0 1
        0 0 1 0 1 0 1 0
        0 0 0 1 0 1 0 1
    """
    window_size = _window(window_size)
    advice = "Give 1 to see every position of the window."
    dilation = whole_number("dilation", dilation, minimum=1, advice=advice)
    name = f"dilated_sliding_window_{window_size}_dilation_{dilation}"
    return Mask(_dilated_sliding_window, name, window_size=window_size, dilation=dilation)


def _dilated_sliding_window(
    b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, window_size: int, dilation: int
) -> Tensor:
    distance = torch.abs(q_idx - kv_idx)
    return (distance <= window_size) & (distance % dilation == 0)


def global_sliding_window(window_size: int, is_global: Tensor | Sequence[bool]) -> Mask:
    """Let a query see `window_size` positions on both sides, and global tokens (Longformer).

    global_sliding_window(1, [True, False, False, False, True, False]):

        1 1 1 1 1 1
        1 1 1 0 1 0
        1 1 1 1 1 0
        1 0 1 1 1 0
        1 1 1 1 1 1
        1 0 0 0 1 1

    `is_global` [S] has a bool for each position. A global token sees all keys, and every query
    sees it.
    """
    window_size = _window(window_size)
    advice = "Give True for a token that sees all others."
    marks = tensor_of("truth values", "is_global", is_global, advice=advice)
    name = f"global_sliding_window_{window_size}"
    return Mask(_global_sliding_window, name, window_size=window_size, is_global=marks)


def _global_sliding_window(
    b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, window_size: int, is_global: Tensor
) -> Tensor:
    near = torch.abs(q_idx - kv_idx) <= window_size
    return near | is_global[q_idx] | is_global[kv_idx]


def prefix_lm(prefix_length: int) -> Mask:
    """Let every query see the first `prefix_length` positions, and the others causally.

    prefix_lm(3):

        1 1 1 0 0 0
        1 1 1 0 0 0
        1 1 1 0 0 0
        1 1 1 1 0 0
        1 1 1 1 1 0
        1 1 1 1 1 1

    If each sequence of a batch has its own prefix, use `or_masks(padding(prefix_lengths), causal)`.
    """
    prefix_length = prefix_number(prefix_length)
    return Mask(_prefix_lm, f"prefix_lm_{prefix_length}", prefix_length=prefix_length)


def _prefix_lm(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, prefix_length: int) -> Tensor:
    return (kv_idx < prefix_length) | (kv_idx <= q_idx)


def padding(lengths: Tensor | Sequence[int]) -> Mask:
    """Hide the keys after the end of each sequence: `lengths` [B] has the length of each.

    padding([3]):

        1 1 1 0 0
        1 1 1 0 0
        1 1 1 0 0
        1 1 1 0 0
        1 1 1 0 0

    Queries after the end see the same keys as the others, so that no row of the mask is empty.
    """
    sizes = lengths_tensor(lengths, "Give the number of tokens of every sequence of the batch.")
    return Mask(_padding, "padding", lengths=sizes)


def _padding(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, lengths: Tensor) -> Tensor:
    return kv_idx < lengths[b]


def neighbourhood(canvas: int | Sequence[int], kernel: int | Sequence[int]) -> Mask:
    """Let a query see a window of `kernel` positions around it, kept inside of `canvas` (NATTEN).

    neighbourhood(6, 3):

        1 1 1 0 0 0
        1 1 1 0 0 0
        0 1 1 1 0 0
        0 0 1 1 1 0
        0 0 0 1 1 1
        0 0 0 1 1 1

    neighbourhood((3, 3), (2, 2)):

        1 1 0 1 1 0 0 0 0
        1 1 0 1 1 0 0 0 0
        0 1 1 0 1 1 0 0 0
        1 1 0 1 1 0 0 0 0
        1 1 0 1 1 0 0 0 0
        0 1 1 0 1 1 0 0 0
        0 0 0 1 1 0 1 1 0
        0 0 0 1 1 0 1 1 0
        0 0 0 0 1 1 0 1 1

    At a border the window moves inwards, so every query sees the same number of keys. An even
    window reaches one position further back than forward. `canvas` and `kernel` have one to three
    sizes, such as (height, width) or (frames, height, width), of which the last varies fastest.
    """
    sizes = _axes("canvas", canvas)
    windows = _axes("kernel", kernel)
    _check_windows(sizes, windows)
    name = f"neighbourhood_{_times(sizes)}_k{_times(windows)}"
    return Mask(_neighbourhood, name, canvas=sizes, kernel=windows)


def _neighbourhood(*place: Tensor, canvas: tuple[int, ...], kernel: tuple[int, ...]) -> Tensor:
    *_, q_idx, kv_idx = place
    near = []
    places = zip(_coordinates(q_idx, canvas), _coordinates(kv_idx, canvas), strict=True)
    for (q, kv), size, window in zip(places, canvas, kernel, strict=True):
        start = torch.clamp(q - window // 2, min=0, max=size - window)
        near.append((start <= kv) & (kv < start + window))
    return functools.reduce(operator.and_, near)


def block_diffusion(seq_len: int, block_size: int) -> Mask:
    """Train block diffusion (BD3-LM) on noised tokens, followed by the same tokens without noise.

    block_diffusion(4, 2):

        1 1 0 0 0 0 0 0
        1 1 0 0 0 0 0 0
        0 0 1 1 1 1 0 0
        0 0 1 1 1 1 0 0
        0 0 0 0 1 1 0 0
        0 0 0 0 1 1 0 0
        0 0 0 0 1 1 1 1
        0 0 0 0 1 1 1 1

    The sequence has `2 * seq_len` positions. A block of `block_size` tokens, noised or clean, sees
    itself and the clean blocks before it.
    """
    advice = "Give the length of the clean sequence."
    seq_len = whole_number("seq_len", seq_len, minimum=1, advice=advice)
    advice = "Give the tokens that are denoised together."
    block_size = whole_number("block_size", block_size, minimum=1, advice=advice)
    name = f"block_diffusion_{seq_len}_{block_size}"
    return Mask(_block_diffusion, name, seq_len=seq_len, block_size=block_size)


def _block_diffusion(
    b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, seq_len: int, block_size: int
) -> Tensor:
    q_noised, kv_noised = q_idx < seq_len, kv_idx < seq_len
    q_block, kv_block = q_idx % seq_len // block_size, kv_idx % seq_len // block_size
    own_block = (q_block == kv_block) & (q_noised == kv_noised)
    clean_before = ~kv_noised & (kv_block < q_block)
    return own_block | clean_before


def _window(window_size: int) -> int:
    advice = "Give how many positions away a query sees, not counting its own."
    return whole_number("window_size", window_size, minimum=0, advice=advice)


def _axes(name: str, sizes: int | Sequence[int]) -> tuple[int, ...]:
    advice = "Give one to three sizes, such as 64, (16, 16) or (8, 16, 16)."
    axes = tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)
    if not 1 <= len(axes) <= 3:
        raise ShapeError(f"{name} must have one to three sizes, but is {sizes!r}. {advice}")
    return tuple(whole_number(name, size, minimum=1, advice=advice) for size in axes)


def _check_windows(sizes: tuple[int, ...], windows: tuple[int, ...]) -> None:
    if len(sizes) != len(windows) or any(map(operator.gt, windows, sizes)):
        raise ShapeError(
            f"kernel must have as many sizes as canvas and none that is larger, but is {windows} "
            f"for canvas {sizes}. Give a window for each dimension, at most its size."
        )


def _coordinates(idx: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """The coordinates of position `idx` on a canvas whose last axis varies fastest."""
    coordinates = []
    for size in reversed(sizes[1:]):
        coordinates.append(idx % size)
        idx = idx // size
    return [idx, *reversed(coordinates)]


def _times(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))

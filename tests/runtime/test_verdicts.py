"""The compiled verdict about a tile is what the interpreter computes from the bounds."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import mods
from quire.codegen.convention import EMPTY, PARTIAL, PLAIN
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32
from quire.codegen.phases.tiles import TileShape
from quire.ir.interpret import interpret
from quire.ir.pyramid import heap
from quire.ir.trace import trace
from quire.request import Problem
from quire.runtime import pyramids
from quire.runtime.mods import capture_shapes, compiled, graphs_of

pytestmark = pytest.mark.every_width

N, PLENTY = 1024, 2**62
RANDOM = torch.Generator().manual_seed(0)
BLOCKS = torch.rand(16, 16, generator=RANDOM) < 0.2
PER_HEAD = torch.rand(2, 16, 16, generator=RANDOM) < 0.2
HEIGHTS = torch.rand(16, 16, generator=RANDOM)
HEIGHTS[3, 4] = math.nan
OWNER = torch.arange(N) // 100
FRIENDS = torch.eye(11, dtype=torch.bool)
BOXES = torch.randint(0, 9, (4, 8, 2), generator=RANDOM)
MASKS: dict[str, Callable[..., Any]] = {
    "window": mods.sliding_window(100),
    "documents": lambda b, h, i, j: OWNER[i] == OWNER[j],
    "blocks": lambda b, h, i, j: BLOCKS[i // 64, j // 64],
    "blocks of heads": lambda b, h, i, j: PER_HEAD[h, i // 64, j // 64],
    "columns first": lambda b, h, i, j: PER_HEAD.mT[h, j // 64, i // 64] & (j <= i),
    "table of documents": lambda b, h, i, j: FRIENDS[OWNER[i], OWNER[j]],
    "from the end": lambda b, h, i, j: BLOCKS[i // 64 - 16, -1 - j // 64] & (j <= i),
    "out of range": lambda b, h, i, j: BLOCKS[i // 60, j // 64],
    "with a NaN": lambda b, h, i, j: HEIGHTS[i // 64, j // 64] > 0.8,
    "three indices": lambda b, h, i, j: BOXES[i // 256, j // 128, (i - j) % 2] > 6,
}


def compiled_verdicts(mask: Callable[..., Any], ends: Tensor) -> Tensor:
    """What the compiled function says of tiles [n, 6]: b, h, q_low, q_high, kv_low, kv_high."""
    problem = Problem(scale=1.0, mask_mod=trace(mask, "mask"))
    graphs, captures = graphs_of(problem, torch.float32, N)
    shapes = capture_shapes(captures, graphs.pyramids)
    code = compiled("panel", TileShape(Target.host(), F32), graphs, shapes)
    everything = [*captures, *pyramids.build(captures, graphs.pyramids, PLENTY)]
    record = code.arguments.pack(everything, 0)
    assert code.addresses["verdict"], "nothing is known of the mask"
    verdict = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p, *[ctypes.c_int64] * 6)(
        code.addresses["verdict"]
    )
    return torch.tensor([verdict(record, *tile) for tile in ends.tolist()])


def interpreted_verdicts(mask: Callable[..., Any], ends: Tensor) -> Tensor:
    problem = Problem(scale=1.0, mask_mod=trace(mask, "mask"))
    graphs, captures = graphs_of(problem, torch.float32, N)
    bounds = graphs.bounds
    assert bounds is not None
    everything = [*captures, *(heap(captures[p.slot], p) for p in bounds.pyramids)]
    names = ("b", "h", "q_low", "q_high", "kv_low", "kv_high")
    env = dict(zip(names, ends.T, strict=True))
    every = torch.ones(len(ends), dtype=torch.bool)
    can, must = (
        interpret(root, env, everything, live=~every) & every for root in (bounds.can, bounds.must)
    )
    return torch.where(must, PLAIN, torch.where(can, PARTIAL, EMPTY))


@pytest.mark.parametrize("name", MASKS)
def test_the_compiled_verdict_is_the_interpreted_one(name: str) -> None:
    random = torch.Generator().manual_seed(1)
    low = torch.randint(0, N, (500, 2), generator=random)
    size = 2 ** torch.randint(0, 11, (500, 2), generator=random)
    low = torch.where(torch.arange(500)[:, None] % 2 == 0, low, low // size * size)
    high = torch.minimum(low + size, torch.tensor(N)) - 1
    heads = torch.arange(500) % 2
    places = (torch.zeros_like(heads), heads, low[:, 0], high[:, 0], low[:, 1], high[:, 1])
    ends = torch.stack(places, -1)
    found = compiled_verdicts(MASKS[name], ends)
    assert torch.equal(found, interpreted_verdicts(MASKS[name], ends))
    assert (found == EMPTY).any(), "it shows nothing"


def test_the_tiles_of_a_table_of_blocks_are_known_exactly() -> None:
    q_low, kv_low = torch.meshgrid(torch.arange(0, N, 16), torch.arange(0, N, 128), indexing="ij")
    ends = torch.stack([0 * q_low, 0 * q_low, q_low, q_low + 15, kv_low, kv_low + 127], -1)
    found = compiled_verdicts(MASKS["blocks"], ends.view(-1, 6)).view(q_low.shape)
    held = BLOCKS.repeat_interleave(4, 0).view(64, 8, 2)  # 16 queries by 128 keys: two blocks
    expected = torch.where(held.all(-1), PLAIN, torch.where(held.any(-1), PARTIAL, EMPTY))
    assert torch.equal(found, expected)

"""Calls like an earlier one: what was checked and planned once is only looked up.

    known = familiar(query, memory, score_mod, masks, scale, queries)
    out = known.again()           # None the first time, and where something is wrong
    known.remember(call)          # after the long way

A signature (`signature.py`) tells calls apart, over dense memory (`dense.py`) and over pages
(`pages.py`). Whatever is out of the ordinary has none, and takes the long way.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.checks import check_position
from quire.ir.trace import Mod
from quire.memory import Dense, Memory, Paged, Queries
from quire.recall import dense, pages
from quire.recall.dense import Recalled
from quire.recall.signature import Signature, layout

__all__ = ["Recalled", "Signature", "familiar", "layout"]


def familiar(
    query: Tensor,
    memory: Memory,
    score_mod: Mod | None,
    masks: tuple[Mod | torch_flex.BlockMask, ...],
    scale: float | None,
    queries: Queries,
) -> dense.Familiar | pages.Familiar | None:
    """The call as one that may be like an earlier one; None if it is out of the ordinary."""
    start, offsets, lengths = queries
    mods = tuple(mask for mask in masks if not isinstance(mask, torch_flex.BlockMask))
    has_blocks = len(mods) < len(masks)
    if offsets is not None or lengths is not None or isinstance(start, Tensor):
        return None
    if type(memory) is Dense:
        if check_position("Dense.start", memory.start) == 0 and (start == 0 or not has_blocks):
            return dense.familiar(query, memory, start, score_mod, masks, scale)
    elif type(memory) is Paged and start is None and not has_blocks:
        return pages.familiar(query, memory, score_mod, mods, scale)
    return None

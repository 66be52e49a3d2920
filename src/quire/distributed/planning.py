"""plan(): compare layouts by the largest work of a rank and the keys it receives, take the best."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import flex_attention as torch_flex

from quire.block_mask import BlockMask, element_mod
from quire.block_mask.blocks import ceil_div
from quire.block_mask.tiles import fastest_form
from quire.checks.arguments import tensor_of, whole_number
from quire.distributed.context_plan import METHODS, ContextPlan, MethodName
from quire.distributed.group import TIMEOUT, RankGroup
from quire.distributed.layouts import LAYOUTS, Division, LayoutName, compared
from quire.distributed.reads import Numbers, Reads, choose_block
from quire.distributed.token_blocks import TokenBlocks
from quire.errors import ArgumentError, OptionError
from quire.ir.graph import inputs
from quire.ir.trace import Mod, Traced, mod_name
from quire.memory import Integers
from quire.mods import noop_mask
from quire.request import Mask
from quire.runtime.slices import slice_size

SLICES_OF_RANK = 8  # at least, so that layouts can be balanced


def plan(
    mask: Mask | None,
    *,
    length: int | None = None,
    lengths: Integers | None = None,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    num_ranks: int | None = None,
    rank: int = 0,
    layout: LayoutName | str = "auto",
    method: MethodName = "auto",
    block_size: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
    bytes_per_key: int | None = None,
    same_bits: bool | None = None,
    timeout: timedelta = TIMEOUT,
) -> ContextPlan:
    """Divide one sequence of `length` tokens among ranks, or several, without communication.

        plan = quire.distributed.plan(mask, length=n, mesh=mesh["cp"])
        x, labels = plan.shard(x, labels, dim=1)
        out = quire.distributed.attention(q, Dense(k, v), plan=plan)

    All ranks make the same plan from the same arguments. `mesh` is a DeviceMesh of one dimension
    or a process group; by default it is the group of all processes, or this process alone if there
    is none. With `num_ranks`, ranks are imagined: the plan can be printed and drawn, as `rank` sees
    it.

    With `lengths` in the place of `length`, it is a batch of sequences that lie one after the other
    in one tensor: shards are `Ragged(key, value, plan.offsets)`. Mods take the sequence as `b`, and
    positions in it. The method is "pages".

    `layout` is "contiguous", "zigzag", "documents", "paired" or "greedy"; "auto" compares all of
    them. `block_size` is the number of tokens that are given away together, 128 or less if ranks
    would have few blocks. If the mask differs by batch entry or head, give `batch` or `heads`.
    `bytes_per_key`, the bytes of a key and its value in all heads, makes the printed plan tell MiB.

    `method` is "pages" (a rank receives the keys that its queries read), "heads" (a rank computes
    some heads over the whole sequence) or "ring" (keys go round by thirds, and a rank holds no more
    of them than it has itself). "auto" takes pages or heads, by which of them a call sends less.

    With `same_bits`, gradients of keys, values and captured tensors have the bits of one process:
    ranks have whole slices of the backward pass, at most 64, and the sums of every slice travel. By
    default it is so if there are eight slices for each rank. Without it ranks can have any blocks,
    and fewer bytes travel. All other results have the bits of one process in any case.

    An operation of the group that takes longer than `timeout` raises an error.
    """
    given = _lengths(length, lengths)
    is_ragged, length = lengths is not None, int(given.sum())
    if is_ragged and (same_bits or method in ("heads", "ring")):
        raise OptionError(
            f"the method must be 'pages' without same_bits if lengths are given, but is {method!r} "
            f"with same_bits {same_bits}. Leave both out, or give the length of one sequence and a "
            f"document mask."
        )
    group = _group(mesh, num_ranks, rank, timeout)
    if layout != "auto" and layout not in LAYOUTS:
        raise ArgumentError(
            f"layout must be one of auto, {', '.join(LAYOUTS)}, but is {layout!r}. Leave it out to "
            f"compare all."
        )
    if method not in METHODS:
        raise ArgumentError(
            f"method must be one of {', '.join(METHODS)}, but is {method!r}. Leave it out to let "
            f"the plan choose."
        )
    if block_size is None:
        block_size = choose_block(given, group.size)
    advice = "Give the number of tokens of a block, such as 128."
    block = whole_number("block_size", block_size, minimum=1, advice=advice)
    slice_blocks = 0 if is_ragged else _slice_blocks(length, block, group.size, same_bits)
    mod, blocks = _traced(mask), TokenBlocks.of(given, block)
    sizes = 1 if is_ragged else _count(mod, "batch", "b", batch), _count(mod, "heads", "h", heads)
    if is_ragged:
        reads = Reads.of(_traced(blocks.spread(mod)), blocks.num * block, block, *sizes)
    else:
        reads = Reads.of(mod, length, block, *sizes)
    if layout == "auto":
        found = tuple(compared(reads, group.size, slice_blocks or 1))
    else:
        found = (Division.of(layout, reads, group.size, slice_blocks or 1),)
    needs = None
    if slice_blocks:
        of_slice = np.arange(reads.num_blocks) // slice_blocks
        needs = reads.of_ranks(of_slice, int(of_slice[-1]) + 1)
    return ContextPlan(
        mask=mod,
        blocks=blocks,
        compared=found,
        group=group,
        sizes=sizes,
        bytes_per_key=bytes_per_key,
        given=mask,
        method="pages" if is_ragged else method,
        slice_size=slice_blocks * block,
        slice_needs=needs,
        at_home=reads.at_home(found[0].owner),
        is_ragged=is_ragged,
    )


def _lengths(length: int | None, lengths: Integers | None) -> Numbers:
    """Return the lengths of all sequences."""
    if (length is None) == (lengths is None):
        raise ArgumentError(
            "either length or lengths must be given, but both or none are. Give the number of "
            "tokens of one sequence, or of each."
        )
    if lengths is None:
        one = whole_number("length", length, minimum=1, advice="Give the number of tokens.")
        return np.array([one])
    advice = "Give the number of tokens of each sequence."
    found = tensor_of("integers", "lengths", lengths, ranks=(1,), advice=advice)
    given: Numbers = found.detach().cpu().numpy().astype(np.int64)
    if (given < 0).any() or given.sum() < 1:
        raise ArgumentError(
            f"lengths must be numbers from 0 on, not all 0, but are {given.tolist()}. {advice}"
        )
    return given


def _slice_blocks(length: int, block: int, num_ranks: int, wanted: bool | None) -> int:
    """Return how many blocks a slice of the backward pass has; 0 if ranks share slices."""
    size = slice_size(length)
    if wanted is None:
        wanted = ceil_div(length, size) >= SLICES_OF_RANK * num_ranks and size % block == 0
    if wanted and size % block:
        raise ArgumentError(
            f"block_size must divide the {size} tokens of a slice for the bits of one process, but "
            f"is {block}. Leave it out, or give same_bits=False."
        )
    return size // block if wanted else 0


def _traced(mask: Mask | None) -> Mod:
    """Return the mask as a function of positions; its trace, if it can be traced."""
    if mask is None or mask is noop_mask:
        mask = everything  # `noop_mask` reads b, as if it could differ by batch entry
    if isinstance(mask, torch_flex.BlockMask):
        mask = element_mod(BlockMask.from_torch(mask))
    return fastest_form(mask, "mask", torch.device("cpu"))


def everything(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Let every query see every key, in all batch entries and heads alike."""
    return q_idx >= 0


def _count(mask: Mod, name: str, index: str, given: int | None) -> int:
    """Return the number of batch entries or heads of a mask."""
    if given is None:
        if isinstance(mask, Traced) and index in inputs(mask.output):
            raise ArgumentError(
                f"{name} must be given for {mod_name(mask)!r}, which reads {index}, but is None. "
                f"Give the number of {'batch entries' if index == 'b' else 'query heads'}."
            )
        return 1
    return whole_number(name, given, minimum=1, advice="Give a number of at least 1.")


def _group(
    mesh: DeviceMesh | dist.ProcessGroup | None,
    num_ranks: int | None,
    rank: int,
    timeout: timedelta,
) -> RankGroup:
    """Return the ranks that share the sequence."""
    if num_ranks is not None:
        if mesh is not None:
            raise ArgumentError(
                "mesh and num_ranks must not both be given, but are. Give the mesh to compute, or "
                "num_ranks to imagine ranks."
            )
        advice = "Give the number of ranks to imagine."
        size = whole_number("num_ranks", num_ranks, minimum=1, advice=advice)
        if not 0 <= whole_number("rank", rank, advice=advice) < size:
            raise ArgumentError(f"rank must be from 0 to {size - 1}, but is {rank}. {advice}")
        return RankGroup(rank, size, timeout=timeout)
    return RankGroup.of(mesh, timeout)

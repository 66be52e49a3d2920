"""The backward pass of a problem: shares of work, where each adds up, and how sums meet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quire.block_mask import BlockRows
from quire.codegen.convention import BLOCK_Q, CAPTURED, GRADIENTS, GRADIENTS_PART, gradient_stride
from quire.codegen.target import Target
from quire.codegen.tiles import Tile
from quire.eager.backward import Above, Gradients, Wanted, folded
from quire.ir.graph import Node
from quire.problem import Problem
from quire.runtime.addressing import Addressing, strides
from quire.runtime.plan import Plan, Rows, make_plan, wide_dtype
from quire.runtime.roots import mod_roots
from quire.runtime.tile_lists import NO_LISTS, tile_lists

ENOUGH_SHARES = 8  # of one sequence; more would need more memory for their sums
QUERIES_OF_SHARE = 1024  # at least


def num_slices(q_len: int, heads: int, key_heads: int) -> int:
    """By how many the queries of a sequence are shared out, for each key head."""
    rows = q_len * (heads // key_heads)
    return max(1, min(-(-ENOUGH_SHARES // key_heads), rows // QUERIES_OF_SHARE))


def backward(
    problem: Problem, memory: Addressing, blocks: BlockRows | None, wanted: Wanted, above: Above
) -> Gradients | None:
    """The gradients; None where something is not finite."""
    return _Backward(problem, memory, blocks, wanted, above).run()


class _Backward:
    """One backward pass."""

    def __init__(
        self,
        problem: Problem,
        memory: Addressing,
        blocks: BlockRows | None,
        wanted: Wanted,
        above: Above,
    ) -> None:
        self.memory, self.wanted, self.above = memory, wanted, above
        lists = NO_LISTS
        if problem.block_mask is not None and blocks is not None:
            lists = tile_lists(blocks, BLOCK_Q, Target.host().block_kv)
        roots, captures = mod_roots(problem, self.dtype, memory.longest, lists.mixed)
        learned = tuple(
            place for place, tensor in enumerate(wanted.captures) if tensor.requires_grad
        )
        self.lists, self.captures = lists, captures
        self.roots = roots._replace(learned=learned)
        results = Rows(above.out, above.lse)
        self.plan: Plan = make_plan(
            "backward", memory, self.roots, captures, lists, BLOCK_Q, problem.scale, results
        )
        self.scale = problem.scale
        heads, key_heads = memory.query.shape[1], memory.key.shape[1]
        self.slices = [num_slices(s.q_len, heads, key_heads) for s in memory.sequences]

    @property
    def dtype(self) -> torch.dtype:
        return wide_dtype(self.memory.query)

    @property
    def tile(self) -> Tile:
        return self.plan.kernel.tile

    def run(self) -> Gradients | None:
        """Launch, and add up."""
        memory, wanted, above = self.memory, self.wanted, self.above
        query, key, value = memory.query, memory.key, memory.value
        grad_query = torch.empty_like(query) if wanted.query else None
        grad_key = self._sums(key) if wanted.key else None
        grad_value = self._sums(value) if wanted.value else None
        delta = torch.zeros_like(above.lse)
        odd = torch.zeros(1, dtype=torch.int64)
        captured = {place: self._captured_sums(place) for place in self.roots.learned}
        table = b"".join(
            CAPTURED.pack_in_order(*captured[load.payload].record())  # type: ignore[index]
            for load in self.roots.slopes.loads
        )
        table_memory = torch.frombuffer(bytearray(table or bytes(8)), dtype=torch.uint8)
        grad_out = above.grad_out
        if grad_out is None:
            grad_out = above.out.new_zeros(()).expand(above.out.shape)
        fields: dict[str, int | float] = dict.fromkeys(GRADIENTS, 0)
        grad_lse = None if above.grad_lse is None else _like(above.grad_lse, above.lse)
        fields |= _strided("grad_out", grad_out)
        if grad_query is not None:
            fields |= _strided("grad_query", grad_query)
        for name, sums in (("grad_key", grad_key), ("grad_value", grad_value)):
            if sums is not None:
                fields[name] = sums.data_ptr()
                slice, batch, head, row, _ = sums.stride()
                fields |= {f"{name}_slice": slice, f"{name}_head": head, f"{name}_row": row}
                fields[f"{name}_batch"] = batch if sums.shape[1] > 1 else 0
        fields |= {
            "grad_lse": 0 if grad_lse is None else grad_lse.data_ptr(),
            "delta": delta.data_ptr(),
            "captured": table_memory.data_ptr(),
            "wants_slopes": int(wanted.scores),
            "slope_scale": self.scale,
            "odd": odd.data_ptr(),
        }
        self._launch(GRADIENTS_PART.pack(fields))
        if odd.item():
            return None
        return Gradients(
            grad_query,
            None if grad_key is None else self._total(grad_key, key),
            None if grad_value is None else self._total(grad_value, value),
            tuple(
                captured[place].total() if place in captured else None
                for place in range(len(wanted.captures))
            ),
            delta,
        )

    def _launch(self, gradients: bytes) -> None:
        memory, above = self.memory, self.above
        key_heads = memory.key.shape[1]
        records, shares = [], 0
        for sequence, slices in zip(memory.sequences, self.slices, strict=True):
            records.append(sequence.record(shares, slices))
            shares += key_heads * slices
        if memory.copies is not None:
            shares *= memory.copies
        if shares == 0 or 0 in memory.query.shape:
            return
        table = memory.page_table
        operands = (memory.query, memory.key, memory.value, above.out, above.lse)
        addresses = (*(tensor.data_ptr() for tensor in operands), 0, 0, 0, 0)
        self.plan.launch_at(
            addresses,
            b"".join(records),
            len(memory.sequences),
            shares,
            memory.work(memory.sequences),
            self.captures,
            self.lists,
            0 if table is None else table.data_ptr(),
            gradients,
        )

    # --- sums

    def _sums(self, rows: Tensor) -> Tensor:
        """Room for the gradients of keys or values: [slices, B, H, rows, whole panels]."""
        batch = self.memory.copies or 1
        width = gradient_stride(self.tile, rows.shape[3]) - self.tile.width
        shape = (max(self.slices, default=1), batch, *rows.shape[1:3], width)
        return torch.zeros(shape, dtype=self.dtype, device="cpu")

    def _total(self, sums: Tensor, like: Tensor) -> Tensor:
        """All slices, and batches where keys are shared by all, together."""
        total = folded(sums)
        if like.shape[0] < total.shape[0]:
            total = folded(total).unsqueeze(0)
        return total[..., : like.shape[3]]

    def _captured_sums(self, place: int) -> CapturedSums:
        tensor = self.captures[place]
        loads = [load for load in self.roots.slopes.loads if load.payload == place]
        direct = [set(_direct_inputs(load)) for load in loads]
        memory = self.memory
        counts = {
            "b": memory.copies if memory.copies is not None else len(memory.sequences),
            "h": memory.key.shape[1],
            "q_idx": max(self.slices, default=1),
        }
        sizes = [
            1 if all(name in names for names in direct) else count for name, count in counts.items()
        ]
        return CapturedSums(torch.zeros((*sizes, *tensor.shape), dtype=self.dtype, device="cpu"))


class CapturedSums(NamedTuple):
    """Sums for a captured tensor: [b, key head, slice, ...], 1 where an index tells them apart."""

    sums: Tensor

    def record(self) -> tuple[int, int, int, int]:
        """Where it is, and from share to share."""
        steps = [
            step if size > 1 else 0
            for size, step in zip(self.sums.shape[:3], self.sums.stride()[:3], strict=True)
        ]
        batch, head, slice = steps
        return self.sums.data_ptr(), batch, head, slice

    def total(self) -> Tensor:
        """All shares together."""
        return folded(self.sums.flatten(0, 2))


def _direct_inputs(load: Node) -> Iterator[str]:
    """The inputs that are indices of a load themselves."""
    for index in load.args:
        while index.op == "cast":
            (index,) = index.args
        if index.op == "input":
            yield str(index.payload)


def _strided(name: str, tensor: Tensor) -> dict[str, int]:
    axes = ("batch", "head", "row", "column")
    steps = dict(zip((f"{name}_{axis}" for axis in axes), strides(tensor), strict=True))
    return {name: tensor.data_ptr(), **steps}


def _like(tensor: Tensor, model: Tensor) -> Tensor:
    """A tensor with the strides of another one."""
    result = torch.empty_like(model)
    return result.copy_(tensor)

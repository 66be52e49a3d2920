"""The arguments of `quire::attention`, and the request that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from quire.block_mask import BlockMask
from quire.ir.trace import Traced
from quire.memory import Dense, Memory, Paged, Queries, Ragged
from quire.operator.text import MODS, Form, read
from quire.request import Mask, Request

SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor[] captures, Tensor[] tables, "
    "SymInt[] numbers, str text"
)
BACKWARD_SCHEMA = (
    f"{SCHEMA}, Tensor out, Tensor lse, Tensor? grad_out, Tensor? grad_lse, bool[] wanted"
)


class CallArguments(NamedTuple):
    """The arguments of the forward pass, in the order of its schema.

    `text` is a `Form`. `captures` are the sink, if there is one, and the tensors that the mods
    captured. `tables` and `numbers` are in the order in which the form names them. AOTInductor
    passes None for an empty list.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    captures: list[Tensor]
    tables: list[Tensor]
    numbers: list[int]
    text: str

    @property
    def form(self) -> Form:
        """Return what the text says."""
        return read(self.text)

    @property
    def learnable(self) -> tuple[Tensor, ...]:
        """Return all tensors that may have a gradient."""
        return (self.query, self.key, self.value, *self.captures)

    def memory(self, named: dict[str, Any]) -> Memory:
        """Return the memory of the call, from tables and numbers by name."""
        kind = self.form.memory
        if kind == "dense":
            return Dense(self.key, self.value, named.get("start", 0))
        if kind == "ragged":
            return Ragged(self.key, self.value, named["offsets"], named.get("lengths"))
        optional = {name: named.get(name) for name in ("first_page", "key_scale", "value_scale")}
        return Paged(self.key, self.value, named["page_table"], named["lengths"], **optional)

    def named_tables(self) -> dict[str, Any]:
        """Return the tables by name."""
        return dict(zip(self.form.tables, self.tables, strict=True))

    def request(self) -> Request:
        """Return the request that these arguments stand for."""
        form = self.form
        named: dict[str, Any] = dict(zip(form.numbers, self.numbers or (), strict=True))
        if self.tables:
            named |= self.named_tables()
        mods = self._mods(form)
        masks: tuple[Mask, ...] = (mods["mask_mod"],) if "mask_mod" in mods else ()
        if form.block_size is not None:
            masks += (_block_mask(named, form.block_size, mods.get("partial_mod")),)
        seed = named.get("seed")
        return Request(
            self.query,
            self.memory(named),
            Queries(named.get("q_start"), named.get("q_offsets"), named.get("q_lengths")),
            score_mod=mods.get("score_mod"),
            masks=masks,
            scale=form.scale,
            dropout_p=form.dropout_p,
            sink=self.captures[0] if form.sink else None,
            aux=form.aux,
            backend=form.backend,
            weighting=form.weighting,
            learns=form.learns,
            seed=None if seed is None else (int(seed[0]), int(seed[1])),
            prob_mod=mods.get("prob_mod"),
        )

    def _mods(self, form: Form) -> dict[str, Traced]:
        captures = self.captures or ()
        first = 1 if form.sink else 0
        mods: dict[str, Traced] = {}
        for field, mod in form.mods.items():
            last = first + len(mod.captures)
            mods[field] = mod.on(tuple(captures[first:last]), MODS[field])
            first = last
        return mods


class BackwardArguments(NamedTuple):
    """The arguments of the backward pass: those of the call, then these in the schema's order.

    `wanted` says of each tensor in `call.learnable` whether its gradient is computed.
    """

    call: CallArguments
    out: Tensor
    lse: Tensor
    grad_out: Tensor | None
    grad_lse: Tensor | None
    wanted: list[bool]

    @staticmethod
    def of(args: Sequence[Any]) -> BackwardArguments:
        """Take the arguments of the operator apart."""
        count = len(CallArguments._fields)
        return BackwardArguments(CallArguments(*args[:count]), *args[count:])

    @property
    def flat(self) -> tuple[Any, ...]:
        """Return them as the operator takes them."""
        return (*self.call, *self[1:])


def _block_mask(named: dict[str, Any], size: tuple[int, int], mask_mod: Any) -> BlockMask:
    rows = named["kv_indices"].shape[-2]
    return BlockMask.from_kv_blocks(
        named["kv_num_blocks"],
        named["kv_indices"],
        named.get("full_kv_num_blocks"),
        named.get("full_kv_indices"),
        BLOCK_SIZE=size,
        mask_mod=mask_mod,
        seq_lengths=(min(named["mask_q_len"], rows * size[0]), named["mask_kv_len"]),
        compute_q_blocks=False,
    )

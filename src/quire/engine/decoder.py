"""A decoder of a known family as a program: a step is one launch for all layers.

    for each layer      norm, q, k, v and rotary embedding ─▶ pages ─▶ attention of each part
                        ─▶ output projection + residual ─▶ norm, gate and up ─▶ down + residual
    at the end          norm and head, if all rows are sampled

The kernels are those that the modules of the packed model launch one by one (`linear/families.py`),
in the same order, so a step has the same bits as a call of the model. Rows stay in the same buffers
from step to step, so records of linear layers are written once for each number of rows. The records
of attention are made for one layer at each step; in the other layers, only the pages are others.

If a step adds a token to as many sequences as the one before, all of its program is used again, and
only tokens, positions, lengths and pages are written to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.codegen.convention import KEYS_OF_PIECE
from quire.codegen.kernels.append import LAYER
from quire.codegen.llvm.walk import ENTRY
from quire.config import config
from quire.engine.original import Snapshot, is_original
from quire.engine.sampling.distribution import Floats
from quire.integrations.transformers.packed import PackedCache, PackedStates, PackedStep
from quire.integrations.transformers.user_mods import NO_MODS
from quire.kv import Group
from quire.linear.epilogues import Rotary, add
from quire.linear.families import GatedMLP
from quire.linear.module import PackedLinear
from quire.linear.rowwise import is_row_wise
from quire.memory.tables import Numbers
from quire.runtime.launch import num_threads
from quire.runtime.program import (
    Appends,
    LayerLaunches,
    Program,
    SteadyCall,
    SteadyCalls,
    aligned,
    can_run,
    field_of,
)
from quire.runtime.recording import PreparedLaunch, recording
from quire.support.bounded import BoundedDict

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM")
MOST_KEPT = 256
"""The most rows of a step whose records are kept for later steps."""
MOST_SAMPLED = 128
"""The most rows whose logits are in a buffer."""
MOST_ANGLES = 2**15
"""The most positions whose angles are kept."""


class Layer(NamedTuple):
    """The packed layers of a decoder layer; `out` and `down` add the residual."""

    attention: Any
    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear


class Buffers(NamedTuple):
    """Rows between the layers of a decoder."""

    hidden: Tensor
    qkv: Tensor
    heads: Tensor  # what attention returns
    gated: Tensor
    cos: Tensor
    sin: Tensor
    logits: Tensor

    def first(self, count: int) -> Buffers:
        """Return some rows, from the first on."""
        return Buffers(*(each[:count] for each in self))


class Linears(NamedTuple):
    """The entries of linear layers, for a number of rows."""

    calls: SteadyCalls
    before: Numbers  # [layers, n, 4], before attention
    after: Numbers  # and after it
    head: Numbers | None  # [n, 4]; None if modules compute it


class Prepared(NamedTuple):
    """A step that is ready to run, and what its program has the addresses of."""

    program: Program
    linears: Linears
    append: Appends
    attention: list[LayerLaunches]
    computes_logits: bool


class PlainTables(NamedTuple):
    """The pages [B, most] and numbers of keys [B] of sequences that get a token each."""

    page_table: Tensor
    lengths: Numbers


class Decoding(NamedTuple):
    """A step that added a token to each of its sequences, without mods.

    In a later step like it, only tokens, lengths and page tables are others.
    """

    prepared: Prepared
    num: int
    threads: int
    pages: Tensor  # the addresses of the pages of each layer


class Decoder:
    """Computes packed rows as a program. `of` returns None for a model that is not known."""

    def __init__(self, model: Any, layers: Sequence[Layer]) -> None:
        self._model, self._layers, self._head = model, layers, _head_of(model)
        self._embedding = model.model.embed_tokens
        self._snapshot = Snapshot(model)
        self._angles = Angles(model.model.rotary_emb)
        self._decoding: Decoding | None = None
        self._buffers: Buffers | None = None
        self._cuts: BoundedDict[int, Buffers] = BoundedDict(64)  # by the number of rows
        self._linears: BoundedDict[tuple[int, int], Linears] = BoundedDict(64)
        self._working = aligned(0)

    @staticmethod
    def of(model: Any, groups: Sequence[Group], dtype: torch.dtype) -> Decoder | None:
        """Return the program of a model, if all its layers are packed and alike."""
        plain = len(groups) == 1 and groups[0].window is None and dtype == torch.float32
        if type(model).__name__ not in FAMILIES or not plain or not can_run():
            return None
        if not is_original(model):
            return None
        layers = [_layer_of(layer) for layer in model.model.layers]
        known = [layer for layer in layers if layer is not None]
        if not known or len(known) < len(layers):
            return None
        return Decoder(model, known)

    @property
    def holds(self) -> bool:
        """Whether the model is still what the program was made of."""
        return self._snapshot.holds

    def compute(
        self,
        cache: PackedCache,
        ids: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
    ) -> Tensor | None:
        """Return the logits of some rows of a step; None if modules must compute it."""
        step, count, threads = cache.step, len(ids), num_threads()
        if step is None or not count or config().check_rows or self._snapshot.is_watched:
            return None
        rows, whole = self._rows(count), len(wanted) == count
        rows.hidden.copy_(self._embedding(torch.tensor(ids)))
        self._angles.write(positions, rows.cos, rows.sin)
        plain = self._plain_tables(cache, step) if whole else None
        prepared = None if plain is None else self._again(step, plain, threads)
        if prepared is None:
            prepared = self._prepare(cache, step, rows, threads, whole=whole)
            if prepared is None:
                return None
            if plain is not None and len(prepared.attention) == 1:
                pages = step.rows.waiting[0].pages
                self._decoding = Decoding(prepared, count, threads, pages)
        prepared.program.run(threads)
        if any(each.wrong for each in prepared.attention):
            return None
        step.rows.all_done()
        if prepared.computes_logits:
            return rows.logits
        chosen = rows.hidden if whole else rows.hidden[list(wanted)]
        if self._head is not None:
            return self._head.forward(chosen)
        logits: Tensor = self._model.lm_head(self._model.model.norm(chosen))
        return logits

    def _prepare(
        self, cache: PackedCache, step: PackedStep, rows: Buffers, threads: int, *, whole: bool
    ) -> Prepared | None:
        """Return a step that is ready to run; None if modules must compute it."""
        linears = self._linears_of(rows, threads)
        query, key, value = self._heads(rows)
        append = self._append(step, key, value)
        attention = self._attention(cache, step, rows, (query, key, value))
        if append is None or attention is None:
            return None
        self._give(attention, threads)
        parts: list[Appends | LayerLaunches] = [append, *attention]
        entries = [linears.before, *(each.entries[:, None] for each in parts), linears.after]
        program = np.concatenate(entries, 1).reshape(-1, len(ENTRY))
        head = linears.head if whole else None
        if head is not None:
            program = np.concatenate([program, head])
        return Prepared(Program(program), linears, append, attention, head is not None)

    def _again(self, step: PackedStep, plain: PlainTables, threads: int) -> Prepared | None:
        """Return the last step once more, for the tokens of this one; None if it was another."""
        last, slots = self._decoding, step.rows.waiting[0]
        if last is None or (last.num, last.threads) != (len(plain.lengths), threads):
            return None
        if last.pages is not slots.pages:
            return None
        prepared = last.prepared
        prepared.append.write_again(slots.address)
        prepared.attention[0].decode_again(*plain)
        return prepared

    def _plain_tables(self, cache: PackedCache, step: PackedStep) -> PlainTables | None:
        """Return the tables of a step that adds a token to each sequence; None if it does more.

        Longer sequences than those of a piece have several pieces, and may share some.
        """
        if not _decodes_plainly(step):
            return None
        memory = cache.memory(0, 0)
        plain = PlainTables(memory.page_table, torch.as_tensor(memory.lengths).numpy())
        is_short = plain.lengths.max() < KEYS_OF_PIECE
        return plain if is_short and plain.page_table.is_contiguous() else None

    # --- rows

    def _rows(self, count: int) -> Buffers:
        if self._buffers is None or len(self._buffers.hidden) < count:
            layer, size = self._layers[0], 1 << (count - 1).bit_length()
            widths = (
                layer.qkv.in_features, layer.qkv.out_features, layer.out.in_features,
                layer.down.in_features, *(layer.attention.head_dim,) * 2,
            )  # fmt: skip
            width = 0 if self._head is None else self._head.out_features
            logits = torch.empty(min(size, MOST_SAMPLED), width)
            rows = [torch.zeros(size, each) for each in widths]
            self._buffers = Buffers(*[*rows, logits])
            self._linears.clear()
            self._cuts.clear()
            self._decoding = None
        known = self._cuts.get(count)
        return self._cuts.keep(count, self._buffers.first(count)) if known is None else known

    def _heads(self, rows: Buffers) -> tuple[Tensor, ...]:
        """Return query, key and value [1, H, T, D]."""
        attention = self._layers[0].attention
        heads = rows.qkv.view(1, len(rows.qkv), -1, attention.head_dim).transpose(1, 2)
        return heads.split_with_sizes(attention.packed_heads, 1)

    # --- entries

    def _linears_of(self, rows: Buffers, threads: int) -> Linears:
        """Return the entries of all linear layers for so many rows."""
        count, num = len(rows.hidden), len(self._layers)
        known = self._linears.get((count, threads))
        if known is not None:
            return known
        given = {"residual": rows.hidden, "cos": rows.cos, "sin": rows.sin}
        calls = []
        for layer in self._layers:
            for linear, x, y in (
                (layer.qkv, rows.hidden, rows.qkv),
                (layer.out, rows.heads, rows.hidden),
                (layer.gate_up, rows.hidden, rows.gated),
                (layer.down, rows.gated, rows.hidden),
            ):
                calls.append(SteadyCall(*linear.launch_on(x, given), x, y))
        if self._head is not None and count <= MOST_SAMPLED:
            x, y = rows.hidden, rows.logits
            calls.append(SteadyCall(*self._head.launch_on(x, {}), x, y))
        steady = SteadyCalls(calls, threads)
        entries = [np.array(each, np.int64) for each in steady.entries]
        parts = np.stack(entries[: 4 * num]).reshape(num, 4, -1, len(ENTRY))
        after = parts[:, 1:].reshape(num, -1, len(ENTRY))
        head = entries[-1] if len(entries) > 4 * num else None
        found = Linears(steady, parts[:, 0], after, head)
        return self._linears.keep((count, threads), found) if count <= MOST_KEPT else found

    def _append(self, step: PackedStep, key: Tensor, value: Tensor) -> Appends | None:
        slots = step.rows.waiting[0]
        found = slots.record(*(each[0].transpose(0, 1) for each in (key, value)))
        if found is None:
            return None
        return Appends(*found, slots.pages)

    def _attention(
        self, cache: PackedCache, step: PackedStep, rows: Buffers, heads: tuple[Tensor, ...]
    ) -> list[LayerLaunches] | None:
        """Return the records of attention for all layers; None if something else computes it."""
        query, key, value = heads
        states = PackedStates(cache, 0, key, value)
        # The page records have the addresses of all layers, which attention reads from.
        pages = step.rows.waiting[0].pages.numpy()
        keys, values = (pages[:, LAYER.index(side)] for side in ("key", "value"))
        module = self._layers[0].attention
        copies: list[LayerLaunches] = []
        for place, part in enumerate(step.parts):
            taken: list[PreparedLaunch] = []
            before = recording.set(taken)
            try:
                out = states.attend_part(module, query, None, place, scaling=module.scaling)
            finally:
                recording.reset(before)
            places = rows.qkv[part.tokens].data_ptr(), int(keys[0])
            if (
                not taken
                or not out.is_contiguous()
                or any(_reads(each) != places for each in taken)
            ):
                return None  # it was computed otherwise, or on copies
            target = rows.heads[part.tokens].data_ptr()
            copies += [LayerLaunches(each, keys, values, target) for each in taken]
        return copies

    def _give(self, copies: Sequence[LayerLaunches], threads: int) -> None:
        """Give the kernels of attention their working memory."""
        each, partials = (max(sizes) for sizes in zip(*(one.needs for one in copies), strict=True))
        size = (threads * each + partials) // 8 + 8
        if len(self._working) < size:
            self._working, self._decoding = aligned(size), None
        address = self._working.ctypes.data
        for one in copies:
            one.give(address, address + threads * each)


def _decodes_plainly(step: PackedStep) -> bool:
    """Return whether a step adds a token to each sequence, without mods."""
    if len(step.parts) != 1 or step.parts[0].offsets is not None:
        return False
    return step.parts[0].mods == step.mods == NO_MODS


class Angles:
    """Cosines and sines of positions. They are kept, unless they depend on the rest of a call."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._keeps = getattr(module, "rope_type", "") in ("default", "linear", "llama3", "yarn")
        self._known: list[Floats] = [np.zeros((0, 0), np.float32)] * 2

    def write(self, positions: Sequence[int], cos: Tensor, sin: Tensor) -> None:
        """Fill cos and sin [T, D] for positions [T]."""
        size = 1 << max(positions).bit_length()
        if not self._keeps or size > MOST_ANGLES:
            found = self._module(cos, torch.tensor([positions]))
            for into, angles in zip((cos, sin), found, strict=True):
                into.copy_(angles[0])
            return
        if len(self._known[0]) < size:
            found = self._module(cos, torch.arange(size)[None])
            self._known = [each[0].numpy() for each in found]
        places = np.array(positions)
        for into, known in zip((cos, sin), self._known, strict=True):
            known.take(places, 0, into.numpy(), "clip")


def _reads(taken: PreparedLaunch) -> tuple[int, int]:
    """Return where a launch of attention reads queries and keys."""
    return field_of(taken, "query"), field_of(taken, "key")


def _head_of(model: Any) -> PackedLinear | None:
    """Return the head with the norm before it; None if modules compute one of them."""
    head, norm = model.lm_head, model.model.norm
    if not isinstance(head, PackedLinear) or not is_row_wise(norm):
        return None
    if head.epilogue is not None or head.shape.norm != "none":
        return None
    return head.with_norm(norm)


def _layer_of(layer: Any) -> Layer | None:
    """Return the packed layers of a decoder layer; None if some are not packed or not known."""
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(mlp, GatedMLP):
        return None
    qkv, out = getattr(attention, "qkv", None), attention.o_proj
    gate_up, down = mlp.gate_up, mlp.down_proj
    if not isinstance(qkv, PackedLinear) or not isinstance(qkv.epilogue, Rotary):
        return None
    if not isinstance(out, PackedLinear) or not isinstance(down, PackedLinear):
        return None
    if any(each.epilogue is not None or each.shape.norm != "none" for each in (out, down)):
        return None
    return Layer(attention, qkv, out.with_epilogue(add), gate_up, down.with_epilogue(add))

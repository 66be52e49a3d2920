"""The forward kernel, launched without the runtime, against the reference in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from compare import assert_as_good_as
from kernel_launch import Call, Tiles, extent_code, mod_code
from torch import Tensor

from quire import reference
from quire.codegen.convention import (
    FULL,
    PARTIAL,
    REWRITE,
    KernelSpec,
    choose_block_q,
    choose_heads,
)
from quire.codegen.llvm import vecmath
from quire.codegen.llvm.builder import Function, Module
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import I1, I64
from quire.codegen.llvm.values import Value
from quire.codegen.mods.arguments import ModArguments
from quire.codegen.mods.functions import write_rewrite
from quire.codegen.scratch import scratch_bytes
from quire.errors import CodegenError

pytestmark = pytest.mark.every_width

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INF, NAN = math.inf, math.nan


def tensors(
    dtype: torch.dtype = torch.float32,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (2, 2),
    lengths: tuple[int, int] = (150, 200),
    dims: tuple[int, int] = (32, 32),
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, heads[0], lengths[0], dims[0]),
        (batch, heads[1], lengths[1], dims[0]),
        (batch, heads[1], lengths[1], dims[1]),
    )
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return query, key, value


def check(call: Call, **mods: object) -> None:
    """out, lse and max_scores are as good as the reference's in the same dtype."""
    out, lse, max_scores = call.run()
    inputs = (call.query, call.key, call.value)
    peer = reference.attention(*inputs, scale=call.scale, sink=call.sink, **mods)
    wide = [x.double() for x in inputs]
    truth = reference.attention(*wide, scale=call.scale, sink=call.sink, **mods)
    size = truth.max_scores.nan_to_num(0, 0, 0).abs().max().item()
    # In float64 the truth is no better than the peer: allow what rounded scores bring.
    spread = 1 + size if out.dtype == torch.float64 else 1.0
    assert_as_good_as(out, peer.out.to(out.dtype), truth.out, "out", size=spread)
    assert_as_good_as(lse, peer.lse, truth.lse, "lse", size=1 + size)
    assert_as_good_as(max_scores, peer.max_scores, truth.max_scores, "max_scores", size=1 + size)


def same_bits(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> None:
    for name, a, b in zip(("out", "lse", "max_scores"), first, second, strict=True):
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        equal = a.contiguous().view(integer) == b.contiguous().view(integer)
        assert bool(equal.all()), f"{name}: {int((~equal).sum())} numbers differ in bits"


# --- mods written by hand


def causal(f: Function, q_idx: Value, kv_idx: Value, score: Value) -> Value:
    return f.select(q_idx >= f.splat(kv_idx, q_idx.type), score, -INF)


def causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def softcap(f: Function, q_idx: Value, kv_idx: Value, score: Value) -> Value:
    return vecmath.tanh(f, score / 2.0) * (2.0 / math.log(4))


# --- dtypes, sizes, strides


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "dims"),
    [
        ((1, 1), (1, 1)),
        ((16, 128), (64, 64)),
        ((300, 260), (64, 64)),
        ((129, 127), (128, 128)),
        ((77, 333), (65, 31)),
        ((50, 143), (7, 66)),
        ((20, 10), (96, 130)),
        ((17, 129), (512, 512)),
        ((33, 5), (3, 257)),
    ],
)
def test_matches_the_reference(
    dtype: torch.dtype, lengths: tuple[int, int], dims: tuple[int, int]
) -> None:
    check(Call(*tensors(dtype, lengths=lengths, dims=dims)))


@pytest.mark.parametrize("heads", [(6, 2), (5, 1), (7, 7), (12, 4)])
def test_groups_of_query_heads(heads: tuple[int, int]) -> None:
    check(Call(*tensors(heads=heads, batch=2, lengths=(40, 70))))


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "heads last": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "columns far apart": lambda x: x.mT.contiguous().mT,
    "every second column": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "padded rows": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "odd start": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "one batch for all": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("layout", sorted(STRIDED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("q_len", [5, 8, 13, 150])
@pytest.mark.parametrize("dims", [(37, 21), (32, 48)])  # the second are read where they lie
def test_any_strides_give_the_same_bits(
    layout: str, dtype: torch.dtype, q_len: int, dims: tuple[int, int]
) -> None:
    query, key, value = tensors(dtype, batch=2, lengths=(q_len, 150), dims=dims)
    view = STRIDED[layout]
    inputs = [view(x) for x in (query, key, value)]
    expected = Call(*(x.contiguous() for x in inputs)).run()
    same_bits(Call(*inputs).run(), expected)
    out = view(torch.zeros(2, query.shape[1], q_len, dims[1], dtype=dtype))
    if layout != "one batch for all":
        same_bits(Call(*inputs, out=out).run(), expected)


@pytest.mark.parametrize("q_len", [5, 8, 13, 131])
@pytest.mark.parametrize("dims", [(13, 45), (32, 48)])
def test_nothing_outside_of_the_tensors_is_touched(q_len: int, dims: tuple[int, int]) -> None:
    """Guards of NaN around every row of every input, and of 7 around every row of the output."""

    def guarded(x: Tensor, number: float) -> Tensor:
        shape = [x.shape[0] + 2, x.shape[1] + 2, x.shape[2] + 2, x.shape[3] + 17]
        big = torch.full(shape, number)
        inner = big[1:-1, 1:-1, 1:-1, 8:-9]
        inner.copy_(x)
        return inner

    query, key, value = tensors(lengths=(q_len, 77), dims=dims)
    expected = Call(query, key, value).run()
    out = guarded(torch.zeros_like(expected[0]), 7.0)
    got = Call(*(guarded(x, NAN) for x in (query, key, value)), out=out).run()
    same_bits(got, expected)
    whole = out._base
    assert whole is not None
    inside = torch.zeros_like(whole, dtype=torch.bool)
    inside[1:-1, 1:-1, 1:-1, 8:-9] = True
    assert bool((whole[~inside] == 7.0).all())


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16], ids=str)
def test_results_can_stay_wide(narrow: torch.dtype) -> None:
    query, key, value = tensors(narrow)
    out, *_ = Call(query, key, value, out_dtype=torch.float32).run()
    truth = reference.attention(query.double(), key.double(), value.double()).out
    peer = reference.attention(query.float(), key.float(), value.float()).out
    assert_as_good_as(out, peer, truth)


def test_mixed_dtypes() -> None:
    query, key, value = tensors()
    key, value = key.bfloat16(), value.half()
    out, *_ = Call(query, key, value).run()
    wide = Call(query, key.float(), value.float()).run()
    assert torch.equal(out, wide[0])
    with pytest.raises(CodegenError, match="expected float64 queries with float64 keys"):
        KernelSpec(Target.host(), "float32", "float64", "float32", "float32")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_outputs_round_to_nearest_even(dtype: torch.dtype) -> None:
    """With one key, out is the value: every float32 goes through the conversion alone."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1, 1, 1, 512 * 8), generator=generator)
    edges = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 1, 0x38800001, 0x477FF000, 0x7FFFFFFF, -1]
    for part in [*bits.split(512, -1), torch.tensor(edges).view(1, 1, 1, -1)]:
        value = part.to(torch.int32).view(torch.float32)
        query = torch.zeros(1, 1, 1, 4)
        out, *_ = Call(query, torch.zeros(1, 1, 1, 4), value, out_dtype=dtype).run()
        expected = value.to(dtype)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(), expected.nan_to_num())


# --- softmax


@pytest.mark.parametrize("scale", [0.0, -0.3, 50.0, 500.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_large_scores(scale: float, dtype: torch.dtype) -> None:
    """Up to 1e4. Where two scores nearly tie their rounding decides, hence many rows."""
    query, key, value = tensors(dtype, lengths=(1000, 300), dims=(8, 8))
    check(Call(query, key, value, scale=scale))


def test_a_sink_joins_the_denominator_once() -> None:
    query, key, value = tensors(heads=(4, 2), lengths=(20, 400))
    check(Call(query, key, value, sink=torch.tensor([0.5, -3.0, 40.0, -INF])))


def test_rows_without_keys() -> None:
    query, key, value = tensors(lengths=(20, 0))
    out, lse, max_scores = Call(query, key, value).run()
    assert bool((out == 0).all() & (lse == -INF).all() & (max_scores == -INF).all())
    sink = torch.tensor([0.5, -2.0])
    out, lse, max_scores = Call(query, key, value, sink=sink).run()
    assert bool((out == 0).all() & (max_scores == -INF).all())
    torch.testing.assert_close(lse, sink.view(1, 2, 1).expand_as(lse))


@pytest.mark.parametrize("place", [0, 130, 199])
@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_scores_that_are_not_finite(place: int, number: float) -> None:
    """One key's score is NaN, inf or -inf for half of the queries."""
    query, key, value = tensors(dims=(8, 8))
    query[..., 0] = torch.tensor([0.0, 1.0]).repeat(75)
    key[..., 0] = 0.0
    query[..., 0] = query[..., 0].abs()
    key[:, :, place, 0] = number
    query[:, :, ::2, 0] = 1e-30 if math.isinf(number) else 0.5
    check(Call(query, key, value))


def test_nan_and_inf_in_one_row() -> None:
    query, key, value = tensors(lengths=(3, 300), dims=(4, 4))
    for first, second in ((5, 250), (250, 5), (7, 8)):
        odd = key.clone()
        odd[:, :, first], odd[:, :, second] = INF, NAN
        out, lse, max_scores = Call(query.abs(), odd, value).run()
        assert bool(out.isnan().all() & lse.isnan().all() & max_scores.isnan().all())


# --- masks and tiles


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_in_every_tile(dtype: torch.dtype) -> None:
    call = Call(*tensors(dtype, lengths=(300, 300)), tile_kind=PARTIAL)
    call.partial_mod = mod_code(call.spec.tile, causal)
    check(call, mask_mod=causal_mask)


def test_a_score_mod_in_every_tile() -> None:
    call = Call(*tensors(lengths=(70, 300)), scores_in_log4=False)
    call.full_mod = mod_code(call.spec.tile, softcap)
    check(call, score_mod=lambda s, b, h, q, kv: 2.0 * torch.tanh(s / 2.0))


def causal_extent(
    f: Function, first_q: Value, last_q: Value, kv_idx: Value
) -> tuple[Value, Value, Value]:
    return f.value(0, I64), last_q + 1 - kv_idx, first_q >= kv_idx + 127


def causal_tiles(length: int, block_q: int) -> Tiles:
    """The tiles of a causal mask; what is above the diagonal is not listed."""
    rows = []
    for start in range(0, length, block_q):
        blocks = range(-(-min(start + block_q, length) // 128))
        rows.append([(block, FULL if block * 128 + 127 <= start else PARTIAL) for block in blocks])
    return Tiles(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", [128, 300, 513])
def test_lists_and_extents_give_the_bits_of_masking_alone(length: int, dtype: torch.dtype) -> None:
    inputs = tensors(dtype, lengths=(length, length))
    plain = Call(*inputs, tile_kind=PARTIAL)
    plain.partial_mod = mod_code(plain.spec.tile, causal)
    expected = plain.run()
    for block_q in (64, 128, 512):
        for extent in (0, extent_code(plain.spec.tile, causal_extent)):
            options = {"block_q": block_q, "extent": extent, "partial_mod": plain.partial_mod}
            same_bits(Call(*inputs, tile_kind=PARTIAL, **options).run(), expected)
            listed = Call(*inputs, tiles=causal_tiles(length, block_q), **options)
            same_bits(listed.run(), expected)
    check(plain, mask_mod=causal_mask)


def test_a_masked_block_does_not_even_change_the_sign_of_zero() -> None:
    """A negative sum that underflows is -0.0, which adding nothing would turn into 0.0."""
    query, key, value = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 384, 1), torch.zeros(1, 1, 384, 1)
    key[0, 0, 128], value[0, 0, :128] = 100.0, -1e-38
    skipped = Call(query, key, value, tiles=Tiles([[(0, FULL), (1, FULL)]]), scale=1.0)
    masked = Call(query, key, value, tiles=Tiles([[(0, FULL), (1, FULL), (2, PARTIAL)]]), scale=1.0)
    masked.partial_mod = mod_code(masked.spec.tile, causal)
    same_bits(masked.run(), skipped.run())


def test_each_head_and_batch_can_have_its_own_tiles() -> None:
    query, key, value = tensors(batch=2, heads=(2, 1), lengths=(200, 300))
    blocks = [[[0], [1, 2]], [[2], []], [[0, 1, 2], [0]], [[1], [0, 2]]]  # per (b, h): two rows
    rows = [[(block, FULL) for block in row] for head in blocks for row in head]
    tiles = Tiles(rows, batch_stride=4, per_head=1)
    out, lse, _ = Call(query, key, value, tiles=tiles, block_q=128).run()
    mask = torch.zeros(2, 2, 200, 300, dtype=torch.bool)
    for place, head in enumerate(blocks):
        for row, listed in enumerate(head):
            for block in listed:
                at = (slice(row * 128, row * 128 + 128), slice(block * 128, block * 128 + 128))
                mask[place // 2, place % 2][at] = True
    truth = reference.attention(
        *(x.double() for x in (query, key, value)), mask_mod=lambda b, h, q, kv: mask[b, h, q, kv]
    )
    torch.testing.assert_close(out.double(), truth.out, atol=2e-6, rtol=0)
    torch.testing.assert_close(lse.double(), truth.lse, atol=2e-6, rtol=0)


def test_panels_read_only_their_extent() -> None:
    """Each panel reads its own range of keys in every block, as a mask with these ranges does."""
    query, key, value = tensors(lengths=(200, 300))
    tile = Call(query, key, value).spec.tile

    def stretch(
        f: Function, first_q: Value, last_q: Value, kv_idx: Value
    ) -> tuple[Value, Value, Value]:
        panel = first_q.udiv(tile.width)
        return panel * 11, panel * 13 + 5, f.value(True, I1)

    def within(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        panel = q_idx // tile.width
        return (kv_idx % 128 >= panel * 11) & (kv_idx % 128 < panel * 13 + 5)

    call = Call(query, key, value, tile_kind=PARTIAL, extent=extent_code(tile, stretch))
    check(call, mask_mod=within)


def test_mods_are_told_where_they_are() -> None:
    """The score becomes b, h, q_idx, kv_idx packed into one number; the maximum tells."""
    query, key, value = tensors(batch=2, heads=(2, 1), lengths=(70, 200))

    def where(f: Function, q_idx: Value, kv_idx: Value, score: Value) -> Value:
        place = f.splat(kv_idx, q_idx.type) * 1000 + q_idx
        return f.convert(place, score.type) * (1 / math.log(4))

    call = Call(query, key, value, q_start=30, kv_begin=7, kv_end=200)
    call.full_mod = mod_code(call.spec.tile, where)
    _, _, max_scores = call.run()
    expected = 199 * 1000 + 30 + torch.arange(70.0)
    torch.testing.assert_close(max_scores, expected.expand(2, 2, 70))


def test_weights_can_be_rewritten_after_the_sum() -> None:
    """Dropout of every odd key, without changing the log-sum-exp."""
    query, key, value = tensors(lengths=(20, 300))

    def drop_odd(f: Function, q_idx: Value, kv_idx: Value, weight: Value) -> Value:
        return f.select((kv_idx & 1).equals(0), weight * 2.0, weight * 0.0)

    call = Call(query, key, value)
    call.weights_mod = mod_code(call.spec.tile, drop_odd)
    keep = torch.tensor([True, False]).repeat(150).expand(1, 2, 20, 300)
    check(call, keep=keep, dropout_p=0.5)


# --- what is not finite in K and V


@pytest.mark.parametrize("number", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_values_reach_only_who_reads_them(number: float, dtype: torch.dtype) -> None:
    query, key, value = tensors(dtype, lengths=(300, 300), dims=(16, 20))
    value[:, 0, 140, 3] = number
    value[:, 1, 299, :] = number
    key[:, 1, 200] = number
    call = Call(query, key, value, tile_kind=PARTIAL)
    call.partial_mod = mod_code(call.spec.tile, causal)
    check(call, mask_mod=causal_mask)
    assert call.out is not None and bool(call.out[:, 0, :140].isfinite().all())


def test_an_odd_value_is_read_even_if_its_weight_is_zero() -> None:
    """Its score is so low that the weight underflows; it is above -inf all the same."""
    query, key, value = (torch.zeros(1, 1, n, 1) for n in (1, 2, 2))
    query[:], key[0, 0, 1], value[0, 0, 1] = 1.0, -1e5, NAN
    out, *_ = Call(query, key, value, scale=1.0).run()
    assert bool(out.isnan().all())
    key[0, 0, 1] = -INF
    out, *_ = Call(query, key, value, scale=1.0).run()
    assert bool((out == 0).all())


def test_careful_panels_have_the_bits_of_ordinary_ones() -> None:
    """NaN in a value that nobody reads changes nothing."""
    query, key, value = tensors(lengths=(200, 300), dims=(24, 17))
    call = Call(query, key, value, tile_kind=PARTIAL)
    call.partial_mod = mod_code(call.spec.tile, causal)
    expected = call.run()
    value = value.clone()
    value[:, :, 201:] = NAN
    odd = Call(query, key, value, tile_kind=PARTIAL, partial_mod=call.partial_mod)
    same_bits(odd.run(), expected)


# --- memories


LENGTHS = [(5, 5), (0, 4), (130, 200), (1, 300), (64, 0), (257, 257)]


def ragged(dtype: torch.dtype) -> tuple[list[tuple[Tensor, Tensor, Tensor]], list[int]]:
    """Return the operands of each sequence, and the position of its first query."""
    each = [
        tensors(dtype, heads=(4, 2), lengths=pair, dims=(40, 24), seed=place)
        for place, pair in enumerate(LENGTHS)
    ]
    return each, [max(0, kv - q) for q, kv in LENGTHS]


def one_by_one(dtype: torch.dtype, **options: object) -> list[tuple[Tensor, ...]]:
    each, starts = ragged(dtype)
    results = []
    for inputs, start in zip(each, starts, strict=True):
        call = Call(*inputs, q_start=start, tile_kind=PARTIAL, **options)
        call.partial_mod = mod_code(call.spec.tile, causal)
        results.append(call.run() if inputs[0].shape[2] else ())
    return results


def split_rows(results: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    sizes = [q for q, _ in LENGTHS]
    parts = [x.split(sizes, 2) for x in results]
    return [tuple(part[k] for part in parts) if sizes[k] else () for k in range(len(sizes))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_ragged_gives_the_bits_of_dense(dtype: torch.dtype, threads: int) -> None:
    each, starts = ragged(dtype)
    query, key, value = (torch.cat(parts, 2) for parts in zip(*each, strict=True))
    sequences, q_row, kv_row = [], 0, 0
    for (q_len, kv_len), start in zip(LENGTHS, starts, strict=True):
        sequences.append(
            {"q_row": q_row, "q_len": q_len, "q_start": start, "kv_row": kv_row, "kv_end": kv_len}
        )
        q_row, kv_row = q_row + q_len, kv_row + kv_len
    call = Call(query, key, value, sequences=sequences, tile_kind=PARTIAL, threads=threads)
    call.partial_mod = mod_code(call.spec.tile, causal)
    for got, expected in zip(split_rows(call.run()), one_by_one(dtype), strict=True):
        if expected:
            same_bits(got, expected)


@pytest.mark.parametrize("page_size", [1, 16, 24, 128, 200])
def test_paged_gives_the_bits_of_dense(page_size: int) -> None:
    """Pages in random order, the rest of every page and every other page poisoned with NaN."""
    each, starts = ragged(torch.float32)
    query = torch.cat([inputs[0] for inputs in each], 2)
    counts = [-(-kv // page_size) for _, kv in LENGTHS]
    numbers = torch.randperm(sum(counts) + 5, generator=torch.Generator().manual_seed(1)).tolist()
    table = torch.full((len(LENGTHS), max(counts)), 1 << 30, dtype=torch.int32)
    pages = [torch.full((sum(counts) + 5, 2, page_size, d), NAN) for d in (40, 24)]
    sequences, q_row = [], 0
    for b, ((q_len, kv_len), inputs) in enumerate(zip(LENGTHS, each, strict=True)):
        for place in range(counts[b]):
            table[b, place] = numbers.pop()
            rows = slice(place * page_size, min((place + 1) * page_size, kv_len))
            for memory, tensor in zip(pages, inputs[1:], strict=True):
                memory[table[b, place], :, : rows.stop - rows.start] = tensor[0, :, rows]
        sequences.append({"q_row": q_row, "q_len": q_len, "q_start": starts[b], "kv_end": kv_len})
        q_row += q_len
    call = Call(
        query, *pages, sequences=sequences, page_table=table, page_size=page_size, threads=2
    )
    call.tile_kind, call.partial_mod = PARTIAL, mod_code(call.spec.tile, causal)
    for got, expected in zip(split_rows(call.run()), one_by_one(torch.float32), strict=True):
        if expected:
            same_bits(got, expected)


def test_a_shard_sits_at_its_own_positions() -> None:
    """Keys 100 to 300 alone: positions stay absolute, and what comes before does not exist."""
    query, key, value = tensors(lengths=(40, 300))
    call = Call(query, key[:, :, 100:], value[:, :, 100:], q_start=200, tile_kind=PARTIAL)
    call.kv_begin, call.kv_end, call.kv_row = 100, 300, -100
    call.partial_mod = mod_code(call.spec.tile, causal)
    out, lse, _ = call.run()
    positions = torch.arange(100, 300)
    truth = reference.attention(
        *(x.double() for x in (query, key[:, :, 100:], value[:, :, 100:])),
        mask_mod=lambda b, h, q, kv: q + 200 >= positions[kv],
    )
    torch.testing.assert_close(out.double(), truth.out, atol=2e-6, rtol=0)
    torch.testing.assert_close(lse.double(), truth.lse, atol=2e-6, rtol=0)


# --- the same bits


def test_threads_and_blocks_change_nothing() -> None:
    inputs = tensors(batch=2, heads=(4, 2), lengths=(400, 300))
    call = Call(*inputs)
    expected, panel = call.run(), call.spec.tile.width
    for threads, panels in ((1, 4), (2, 8), (4, 16), (3, 32), (1, 1), (2, 3)):
        same_bits(Call(*inputs, threads=threads, block_q=panels * panel).run(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (37, 21)])
@pytest.mark.parametrize("kv_len", [8, 9, 12, 300])
@pytest.mark.parametrize("masked", [False, True])
def test_half_a_panel_gives_the_bits_of_a_whole_one(
    dtype: torch.dtype, dims: tuple[int, int], kv_len: int, masked: bool
) -> None:
    query, key, value = tensors(dtype, lengths=(40, kv_len), dims=dims)
    whole = Call(query, key, value)
    whole.full_mod = mod_code(whole.spec.tile, causal) if masked else 0
    expected = whole.run()
    for q_len in (1, 5, 8, 16, 17, 24, 37):
        some = Call(query[:, :, :q_len].contiguous(), key, value, full_mod=whole.full_mod)
        same_bits(some.run(), tuple(x[:, :, :q_len] for x in expected))


@pytest.mark.parametrize("number", [NAN, INF])
def test_half_a_panel_of_odd_numbers(number: float) -> None:
    query, key, value = tensors(lengths=(40, 30))
    key[0, 0, 3, 5] = value[0, 1, 4, 6] = number
    whole = Call(query, key, value).run()
    got = Call(query[:, :, :7].contiguous(), key, value).run()
    same_bits(got, tuple(x[:, :, :7] for x in whole))


@pytest.mark.parametrize("size", [2, 3, 6])
def test_items_of_several_heads_change_nothing(size: int) -> None:
    query, key, value = tensors(heads=(6, 2), batch=3, lengths=(30, 70))
    rows = [[(b + h) % 2 * [(0, FULL)] for h in range(6)] for b in range(3)]
    lists = Tiles([blocks for row in rows for blocks in row], batch_stride=6, per_head=1)
    for tiles in (None, lists):
        expected = Call(query, key, value, tiles=tiles).run()
        for threads in (1, 2):
            options = {"tiles": tiles, "heads_of_item": size, "threads": threads}
            same_bits(Call(query, key, value, **options).run(), expected)


def test_a_batch_changes_nothing() -> None:
    query, key, value = tensors(batch=3, heads=(4, 2), lengths=(200, 300))
    whole = Call(query, key, value).run()
    for b in range(3):
        alone = Call(query[b : b + 1], key[b : b + 1], value[b : b + 1]).run()
        same_bits(alone, tuple(x[b : b + 1] for x in whole))


def test_launches_from_many_threads_do_not_meet() -> None:
    """Scratch belongs to a call; here each of four calls has its own and runs on two threads."""
    import threading

    inputs = [tensors(lengths=(200, 200), seed=seed) for seed in range(4)]
    expected = [Call(*each).run() for each in inputs]
    calls = [Call(*each, threads=2) for each in inputs]
    workers = [threading.Thread(target=call.run) for call in calls]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for call, truth in zip(calls, expected, strict=True):
        same_bits((call.out, call.lse, call.max_scores), truth)


# --- the convention


def test_mods_are_called_as_they_are_written() -> None:
    spec = KernelSpec(Target.named("x86-64-v3"))
    module, nothing = Module(), ModArguments.of([], [])
    write_rewrite(module, "rewrite", spec.tile, nothing, None, [])
    declared = ", ".join(f"{type} %{name}" for name, type in REWRITE.parameters.items())
    assert f"define void @rewrite({declared})" in module.text


def test_scratch_and_blocks() -> None:
    spec = KernelSpec(Target.named("x86-64-v3"))
    assert scratch_bytes("panel", spec.tile, 64, 64, 128) % 64 == 0
    assert scratch_bytes("panel", spec.tile, 512, 512, 64) < 2**20
    assert choose_block_q(spec.tile, 64, 64, rows=8 * 8192, threads=2) == 512
    assert choose_block_q(spec.tile, 512, 512, rows=8 * 8192, threads=2) == 256
    assert choose_block_q(spec.tile, 64, 64, rows=8 * 512, threads=16) == 64
    assert choose_block_q(spec.tile, 64, 64, rows=1, threads=1) == 64


def test_heads_of_an_item() -> None:
    assert choose_heads(8, longest=8, sequences=1024, block_q=512, threads=2) == 8
    assert choose_heads(8, longest=128, sequences=1024, block_q=512, threads=2) == 4
    assert choose_heads(6, longest=128, sequences=1024, block_q=512, threads=2) == 3
    assert choose_heads(8, longest=8, sequences=4, block_q=512, threads=2) == 4
    assert choose_heads(8, longest=8192, sequences=1024, block_q=512, threads=2) == 1
    assert choose_heads(7, longest=100, sequences=1024, block_q=512, threads=2) == 1
    assert choose_heads(0, longest=0, sequences=0, block_q=64, threads=1) == 1

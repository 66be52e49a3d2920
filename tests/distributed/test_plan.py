"""Plans: which tokens each rank has, which keys it receives, and how layouts compare."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import quire
from quire.distributed import ContextPlan, plan
from quire.distributed.layouts import LAYOUTS, Division
from quire.distributed.reads import Reads, choose_block
from quire.errors import ArgumentError, DistributedError, OptionError, RankError, ShapeError
from quire.ir.trace import trace
from quire.mods import causal, document, sliding_window

MASKS = {
    "causal": causal,
    "window": sliding_window(70),
    "documents": causal & document(lengths=[40, 300, 7, 153]),
    "never": lambda b, h, q_idx, kv_idx: q_idx < 0,
    "future": lambda b, h, q_idx, kv_idx: q_idx < kv_idx,
}


def by_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() < 100 * b


def many_documents(length: int) -> list[int]:
    """Return lengths of documents of which a few are long."""
    draw = torch.Generator().manual_seed(0)
    sizes = (6 + 1.6 * torch.randn(4000, generator=draw)).exp().long().clamp(16, length // 16)
    before = int((sizes.cumsum(0) < length).sum())
    return [*sizes[:before].tolist(), length - int(sizes[:before].sum())]


# Tokens


@given(
    length=st.integers(1, 500),
    num_ranks=st.integers(1, 9),
    layout=st.sampled_from(["auto", *LAYOUTS]),
    mask=st.sampled_from([*MASKS.values()]),
    block_size=st.sampled_from([None, 1, 16, 50, 128]),
)
def test_every_token_has_one_rank(
    length: int, num_ranks: int, layout: str, mask: Any, block_size: int | None
) -> None:
    made = plan(mask, length=length, num_ranks=num_ranks, layout=layout, block_size=block_size)
    parts = [made.for_rank(rank).positions for rank in range(num_ranks)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(length))
    assert all(torch.equal(part, part.sort().values) for part in parts)
    sizes = np.bincount(made.division.owner, minlength=num_ranks)
    assert sizes.max() - sizes.min() <= 1
    for rank, part in enumerate(parts):
        chunks = made.for_rank(rank).chunks
        assert part.tolist() == [n for start, stop in chunks for n in range(start, stop)]


@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=9).filter(any),
    num_ranks=st.integers(1, 5),
    layout=st.sampled_from(["auto", *LAYOUTS]),
    mask=st.sampled_from([causal, MASKS["window"], MASKS["future"]]),
    block_size=st.sampled_from([None, 16, 50]),
)
def test_every_token_of_several_sequences_has_one_rank_and_all_keys_that_it_reads(
    lengths: list[int], num_ranks: int, layout: str, mask: Any, block_size: int | None
) -> None:
    made = plan(mask, lengths=lengths, num_ranks=num_ranks, layout=layout, block_size=block_size)
    parts = [made.for_rank(rank) for rank in range(num_ranks)]
    every = torch.cat([each.rows for each in parts])
    assert torch.equal(every.sort().values, torch.arange(sum(lengths)))
    texts = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    places = torch.cat([torch.arange(n) for n in lengths])
    for rank, each in enumerate(parts):
        assert len(each.rows) == made.num_tokens[rank]
        assert torch.equal(each.positions, places[each.rows])
        counts = texts[each.rows].bincount(minlength=len(lengths))
        assert np.diff(each.offsets).tolist() == counts.tolist()
        assert [n for start, stop in each.chunks for n in range(start, stop)] == each.rows.tolist()
        alike = texts[each.rows, None] == texts
        reads = alike & mask(0, 0, places[each.rows, None], places)  # type: ignore[operator]
        needed = made.blocks.rows(made.division.needs[rank, 0].nonzero()[0])
        assert set(reads.any(0).nonzero().flatten().tolist()) <= set(needed.tolist())


@given(layout=st.sampled_from(LAYOUTS), name=st.sampled_from([*MASKS]), num_ranks=st.integers(1, 7))
def test_a_rank_has_every_key_that_its_queries_read(layout: Any, name: str, num_ranks: int) -> None:
    made = plan(MASKS[name], length=500, num_ranks=num_ranks, layout=layout, block_size=16)
    elements = quire.create_mask(MASKS[name], None, None, 500, 500, "cpu")[0, 0]
    for rank in range(num_ranks):
        read = elements[made.for_rank(rank).positions].any(0).nonzero().flatten()
        blocks = sorted({int(key) // 16 for key in read})
        assert made.division.needs[rank, 0].nonzero()[0].tolist() == blocks
        own = set((made.division.owner == rank).nonzero()[0].tolist())
        assert made.received[rank] == 16 * len(set(blocks) - own)


@given(layout=st.sampled_from(LAYOUTS), name=st.sampled_from([*MASKS]), num_ranks=st.integers(1, 7))
def test_what_one_rank_sends_another_receives(layout: Any, name: str, num_ranks: int) -> None:
    made = plan(MASKS[name], length=500, num_ranks=num_ranks, layout=layout, block_size=16)
    routes = [made.for_rank(rank).route(3) for rank in range(num_ranks)]
    for one, sender in enumerate(routes):
        for other, receiver in enumerate(routes):
            assert sender.num_sent[other] == receiver.num_received[one]
    for rank, route in enumerate(routes):
        # Follow each page of the table back to the block and entry that it was sent from.
        pages = [(entry, int(block)) for entry in range(3) for block in route.own]
        for sender in routes:
            first = int(sender.num_sent[:rank].sum())
            sent = sender.sent[first : first + int(sender.num_sent[rank])].tolist()
            pages += [
                (page // len(sender.own), int(sender.own[page % len(sender.own)])) for page in sent
            ]
        for entry, block in np.argwhere(route.table >= 0).tolist():
            assert pages[route.table[entry, block]] == (entry, block)


def test_shards() -> None:
    made = plan(causal, length=100, num_ranks=3, block_size=16)
    x, labels = torch.randn(2, 100, 4), torch.arange(100)
    for rank in range(3):
        mine = made.for_rank(rank)
        (part,) = mine.shard(x, dim=1)
        assert torch.equal(part, x[:, mine.positions])
        assert torch.equal(*mine.shard(labels, dim=0), mine.positions)
    alone = plan(causal, length=100)
    assert torch.equal(alone.gather(x, dim=1), x) and torch.equal(*alone.shard(x, dim=1), x)


# Layouts


def of_layout(layout: Any, mask: Any, length: int, num_ranks: int) -> Division:
    block = choose_block(np.array([length]), num_ranks)
    return Division.of(layout, Reads.of(trace(mask, "mask"), length, block, 1, 1), num_ranks)


def test_zigzag_is_balanced_for_a_causal_mask() -> None:
    assert of_layout("zigzag", causal, 2**16, 8).balance < 1.01
    assert of_layout("contiguous", causal, 2**16, 8).balance > 1.8


def test_a_window_stays_contiguous() -> None:
    made = plan(sliding_window(512), length=2**16, num_ranks=8)
    assert made.layout == "contiguous"
    assert made.received.tolist() == [0] + [512] * 7


@pytest.mark.parametrize("num_ranks", [2, 8, 32])
def test_documents_are_balanced_and_stay_together(num_ranks: int) -> None:
    length = 2**18
    mask = causal & document(lengths=many_documents(length))
    assert plan(mask, length=length, num_ranks=num_ranks).balance < 1.1
    made = plan(mask, length=length, num_ranks=num_ranks, same_bits=False)
    assert made.balance < 1.05
    assert made.received.max() < length / 10
    assert made.received.mean() < length / 15
    assert made.compared[-1].balance > made.balance


def test_heavy_and_light_blocks_are_paired() -> None:
    # A quarter of all queries reads much. All read the first key, so it is one document.
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx == 0) | ((q_idx // 8192 == 1) & (kv_idx < 8192))

    assert of_layout("paired", mask, 2**15, 8).balance < 1.05
    assert of_layout("contiguous", mask, 2**15, 8).balance > 3


def test_greedy_finds_queries_that_share_keys() -> None:
    # Even and odd blocks read the even and the odd blocks: neighbours share nothing.
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx // 128 % 2 == kv_idx // 128 % 2

    assert of_layout("greedy", mask, 2**13, 2).received.max() == 0
    assert of_layout("contiguous", mask, 2**13, 2).received.max() == 32


def test_masks_that_differ_by_batch_or_head() -> None:
    made = plan(by_batch, length=640, num_ranks=2, batch=3, layout="contiguous", block_size=32)
    entries = made.division.arrives[1].sum(1).tolist()
    assert entries == [0, 4, 7]  # entry 0 reads nothing, the others 99 and 199 tokens around
    assert made.received[1] == 32 * 4  # the mean, rounded up
    table = made.for_rank(1).route(3).table
    assert (table[0] == -1).all()


@pytest.mark.parametrize("mask", [None, quire.noop_mask])
def test_no_mask_is_the_same_for_all_batch_entries_and_heads(mask: Any) -> None:
    made, x = plan(mask, length=64, num_ranks=1), torch.randn(2, 3, 64, 16)
    assert made.sizes == (1, 1)
    with quire.distributed.context_parallel(made):
        found = quire.attention(x, quire.Dense(x, x), mask=quire.noop_mask)
    assert torch.equal(found, quire.attention(x, quire.Dense(x, x)))


def test_a_mask_without_a_graph() -> None:
    def odd(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.special.bessel_j0(q_idx.float()) > 2  # never

    assert plan(odd, length=200, num_ranks=2).received.tolist() == [0, 0]


def test_a_block_mask() -> None:
    mask = quire.create_block_mask(sliding_window(64), None, None, 512, 512, "cpu", 32)
    of_blocks = plan(mask, length=512, num_ranks=4, block_size=32)
    of_function = plan(sliding_window(64), length=512, num_ranks=4, block_size=32)
    assert np.array_equal(of_blocks.division.needs, of_function.division.needs)


# Plans as values


def test_equal_plans_have_one_digest() -> None:
    def made(mask: Any = causal, **more: Any) -> str:
        return plan(mask, **{"length": 500, "num_ranks": 4, **more}).digest

    lengths = [100, 400]
    assert made() == made() == plan(causal, length=500, num_ranks=4).for_rank(3).digest
    assert made(causal & document(lengths=lengths)) == made(causal & document(lengths=lengths))
    others = [
        made(),
        made(length=501),
        made(num_ranks=3),
        made(layout="contiguous"),
        made(block_size=64),
        made(sliding_window(499)),
        made(sliding_window(498)),
        made(causal & document(lengths=lengths)),
        made(causal & document(lengths=[101, 399])),
    ]
    assert len({*others}) == len(others)


def test_it_is_printed() -> None:
    made = plan(sliding_window(512), length=2**16, num_ranks=8, rank=1, bytes_per_key=4096)
    assert str(made) == repr(made)
    first, second, third, fourth, last = str(made).splitlines()
    assert first == (
        "sliding_window_512: 65,536 tokens over 8 ranks, layout contiguous, blocks of 128, "
        "balance 1.00"
    )
    assert second == "a rank receives at most 2 of 224 MiB, 2 MiB on average"
    assert third == "rank 1: 8,192 tokens in 1 chunk, receives 2 MiB"
    assert fourth == (
        "gradients of keys have the bits of one process; a rank receives those of 512 keys at most"
    )
    assert last.startswith("compared with ") and "zigzag 1.0" in last
    keys = plan(sliding_window(512), length=2**16, num_ranks=8, layout="zigzag")
    assert "a rank receives at most 1,024 of 57,344 keys" in str(keys)


@pytest.mark.parametrize("method", ["heads", "ring"])
def test_it_says_for_which_method_it_counts_keys(method: Any) -> None:
    made = plan(causal, length=1000, num_ranks=4, method=method, layout="zigzag")
    last = str(made).splitlines()[-1]
    assert last == f"the method is {method}; what is received is that of the method pages"


def test_routes_are_kept_as_long_as_their_plan() -> None:
    made = plan(causal, length=16384, num_ranks=2, same_bits=True)
    assert made.route(2) is made.route(2) and made.route(2) is not made.for_rank(1).route(2)
    assert made.slice_route(0, 1) is made.slice_route(0, 1)
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None


def test_it_is_drawn() -> None:
    divided = plan(sliding_window(32), length=256, num_ranks=4, layout="zigzag", block_size=16)
    assert str(quire.draw(divided)).splitlines()[1:] == [
        "  0       128",
        "0 ██··········░░██",
        "1 ░░██······░░██··",
        "2 ··░░██··░░██····",
        "3 ····░░████······",
        "█ computes and sends  ░ receives  · does not need  (a cell is 16 tokens)",
    ]


@pytest.mark.parametrize("num_ranks", [1, 3, 500])
def test_it_is_a_picture(num_ranks: int) -> None:
    pytest.importorskip("matplotlib")
    drawing = quire.draw(plan(causal, length=100_000, num_ranks=num_ranks))
    assert "computes and sends" in drawing.svg() and "tokens over" in drawing.svg()
    assert max(map(len, str(drawing).splitlines()[1:-1])) <= 80
    assert len(str(drawing).splitlines()) <= 67


# Errors


def made(**changes: Any) -> ContextPlan:
    return plan(**{"mask": causal, "length": 64, "num_ranks": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"length": 0}, ArgumentError, r"length must be a whole number of at least 1, but is 0"),
        (
            {"layout": "spiral"},
            ArgumentError,
            r"layout must be one of auto, contiguous, .* 'spiral'",
        ),
        ({"rank": 2}, ArgumentError, r"rank must be from 0 to 1, but is 2"),
        ({"mesh": "cp"}, ArgumentError, r"mesh and num_ranks must not both be given"),
        (
            {"mesh": "cp", "num_ranks": None},
            ArgumentError,
            r"mesh must be a DeviceMesh or a process",
        ),
        ({"mask": by_batch}, ArgumentError, r"batch must be given for 'by_batch', which reads b"),
        ({"block_size": 0}, ArgumentError, r"block_size must be a whole number of at least 1"),
        ({"lengths": [3, 4]}, ArgumentError, r"either length or lengths must be given, but both"),
        ({"length": None}, ArgumentError, r"either length or lengths must be given, but both"),
        (
            {"length": None, "lengths": [3, -1]},
            ArgumentError,
            r"lengths must be numbers from 0 on, not all 0, but are \[3, -1\]",
        ),
        (
            {"length": None, "lengths": [3, 4], "method": "ring"},
            OptionError,
            r"method must be 'pages' without same_bits if lengths are given, but is 'ring'",
        ),
        (
            {"length": None, "lengths": [3, 4], "same_bits": True},
            OptionError,
            r"method must be 'pages' without same_bits if lengths are given",
        ),
    ],
)
def test_arguments(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        made(**changes)


def test_what_does_not_fit_a_plan() -> None:
    x = torch.randn(1, 2, 32, 8)
    with pytest.raises(ShapeError, match=r"must have 64 tokens along dim 2 to be cut"):
        made().shard(x, dim=2)
    with pytest.raises(ShapeError, match=r"a shard must have the 32 tokens of rank 0 along dim 1"):
        plan(causal, length=32).gather(x, dim=1)
    with pytest.raises(ArgumentError, match=r"rank must be from 0 to 1, but is 5"):
        made().for_rank(5)
    with pytest.raises(DistributedError, match=r"must have a process group to send anything"):
        made().gather(x, dim=2)


def test_several_sequences_in_a_context() -> None:
    divided, x = plan(causal, lengths=[20, 12]), torch.randn(32, 2, 8)
    ragged = quire.Ragged(x, x, [0, 20, 32])
    with quire.distributed.context_parallel(divided, instead_of=causal):
        out = quire.attention(x, ragged, mask=causal, q_start=0)
    assert torch.equal(out, quire.attention(x, ragged, mask=causal, q_start=0))
    assert "32 tokens of 2 sequences over 1 ranks" in str(divided)
    assert len({divided.digest, plan(causal, lengths=[12, 20]).digest}) == 2
    rows = x.transpose(0, 1).unsqueeze(0)
    with pytest.raises(ArgumentError, match=r"memory must be Ragged\(key, value, plan.offsets\)"):
        quire.distributed.attention(rows, quire.Dense(rows, rows), plan=divided)
    with pytest.raises(ArgumentError, match=r"memory must be Dense\(key, value\) without a start"):
        quire.distributed.attention(x, ragged, plan=plan(causal, length=32))


def attended(made: ContextPlan, **options: Any) -> torch.Tensor:
    """Attention of one process by a plan; the operands are the same in each call."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, made.length, 16, generator=draw)
    return quire.distributed.attention(query, quire.Dense(key, value), plan=made, **options)


def test_a_scale_that_changes_is_read_in_each_call() -> None:
    made, scale = plan(causal, length=100), torch.tensor(0.1)
    assert torch.equal(attended(made, scale=scale), attended(made, scale=0.1))
    scale.fill_(0.5)
    assert torch.equal(attended(made, scale=scale), attended(made, scale=0.5))


def test_a_plan_is_used_inside_and_outside_of_inference_mode() -> None:
    made = plan(causal, length=100)
    with torch.inference_mode():
        inside = attended(made).clone()
    assert torch.equal(inside, attended(made))


def test_a_plan_that_was_used_can_be_copied() -> None:
    made = plan(causal, length=100)
    out = attended(made)
    assert torch.equal(attended(copy.deepcopy(made)), out)


def test_what_attention_refuses() -> None:
    alone, x = plan(causal, length=32), torch.randn(1, 2, 32, 8)
    dense = quire.Dense(x, x)
    attend = quire.distributed.attention
    with pytest.raises(ShapeError, match=r"key must be the shard of rank 0, \[1, 2, 32, 8\]"):
        attend(x, quire.Dense(x[:, :, 1:], x[:, :, 1:]), plan=alone)
    with pytest.raises(ArgumentError, match=r"memory must be Dense\(key, value\) without a start"):
        attend(x, quire.Dense(x, x, start=3), plan=alone)
    with pytest.raises(OptionError, match=r"key_mass must not be asked for over ranks"):
        attend(x, dense, plan=alone, return_aux=quire.AuxRequest(key_mass=True))
    with pytest.raises(OptionError, match=r"AuxRequest.weights must be None over ranks"):
        attend(x, dense, plan=alone, return_aux=quire.AuxRequest(weights=[0]))
    with (
        quire.distributed.context_parallel(alone),
        pytest.raises(OptionError, match=r"weights must be None inside of context_parallel"),
    ):
        quire.attention(x, dense, return_aux=quire.AuxRequest(weights=[0]))
    with pytest.raises(ShapeError, match=r"query must have batch 3, as the plan has, but has 1"):
        attend(x, dense, plan=plan(by_batch, length=32, batch=3))
    (part,) = made().shard(torch.randn(1, 2, 64, 8), dim=2)
    with pytest.raises(DistributedError, match=r"must have a process group to send anything"):
        attend(part, quire.Dense(part, part), plan=made())


def test_a_graph_inside_of_a_context_is_refused() -> None:
    divided, x = plan(causal, length=32), torch.randn(1, 2, 32, 8)
    compiled = torch.compile(lambda x: quire.attention(x, quire.Dense(x, x)), backend="eager")
    with (
        quire.distributed.context_parallel(divided),
        pytest.raises(quire.errors.BackendError, match=r"must not be in a graph"),
    ):
        compiled(x)
    alone = quire.attention(x, quire.Dense(x, x), mask=causal)
    spread = torch.compile(
        lambda x: quire.distributed.attention(x, quire.Dense(x, x), plan=divided), backend="eager"
    )
    assert torch.equal(spread(x), alone)


def test_a_mesh_of_two_dimensions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = object.__new__(torch.distributed.device_mesh.DeviceMesh)
    monkeypatch.setattr(type(mesh), "ndim", 2)
    monkeypatch.setattr(type(mesh), "__repr__", lambda _: "a mesh")
    with pytest.raises(RankError, match=r"mesh must have one dimension"):
        made(mesh=mesh, num_ranks=None)

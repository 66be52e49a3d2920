"""Every mod against a double loop in plain Python, its drawing, its name and its errors."""

from __future__ import annotations

import doctest
import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, vmap
from torch.nn.attention import flex_attention as theirs

from quire import mods
from quire.errors import (
    ArgumentError,
    DtypeError,
    ModError,
    NotCallableError,
    QuireError,
    ShapeError,
)
from quire.ir.trace import trace
from quire.mods import attention_gym
from quire.mods.compose import all_of, chain, shift
from quire.mods.packed import _preorder

Mod = Callable[..., Any]
PUBLIC = [
    value
    for value in (getattr(mods, name) for name in mods.__all__)
    if inspect.isfunction(value) or isinstance(value, mods.Mask)
]


# Three ways to run a mod, which must agree


def positions(B: int, H: int, L: int, S: int) -> list[Tensor]:
    """b, h, q_idx and kv_idx as tensors that broadcast to [B, H, L, S]."""
    sizes = (B, H, L, S)
    return [
        torch.arange(n).view([-1 if d == i else 1 for d in range(4)]) for i, n in enumerate(sizes)
    ]


def vmapped(mod: Mod, *args: Tensor) -> Tensor:
    """One element at a time, as PyTorch runs mods."""
    sizes = torch.broadcast_shapes(*(arg.shape for arg in args))
    flat = [arg.expand(sizes).flatten() for arg in args]
    return vmap(lambda *element: mod(*element))(*flat).view(sizes)


def broadcast(mod: Mod, *args: Tensor) -> Tensor:
    sizes = torch.broadcast_shapes(*(arg.shape for arg in args))
    return mod(*args).expand(sizes)


def traced(mod: Mod, *args: Tensor) -> Tensor:
    sizes = torch.broadcast_shapes(*(arg.shape for arg in args))
    if len(args) == 4:
        return trace(mod, "mask")(*args).expand(sizes)
    return trace(mod, "score", score_dtype=args[0].dtype)(*args).expand(sizes)


WAYS = (vmapped, broadcast, traced)


def looped(plain: Mod, B: int, H: int, L: int, S: int) -> Tensor:
    """What `plain`, a function of Python numbers, says at every place."""
    places = itertools.product(range(B), range(H), range(L), range(S))
    return torch.tensor([plain(*place) for place in places]).view(B, H, L, S)


def shown(mod: Mod, L: int, S: int) -> Tensor:
    return vmapped(mod, *positions(1, 1, L, S))[0, 0]


# Masks


class Case(NamedTuple):
    """A mask, its meaning in plain Python, what it is called, and the sizes to try it at."""

    mask: Mod
    plain: Callable[[int, int, int, int], bool]
    name: str
    sizes: tuple[int, int, int, int] = (1, 1, 12, 12)


def same_document(lengths: Sequence[int], q: int, kv: int) -> bool:
    ends = list(itertools.accumulate(lengths))
    return any(e - n <= q < e and e - n <= kv < e for e, n in zip(ends, lengths, strict=True))


def ancestors(parents: Sequence[int], node: int) -> set[int]:
    path = set()
    while node >= 0:
        path.add(node)
        node = parents[node]
    return path


def in_window(sizes: Sequence[int], windows: Sequence[int], q: int, kv: int) -> bool:
    """The window is the kernel's cells nearest to the query: slide it until it fits."""
    for size, window in zip(reversed(sizes), reversed(windows), strict=True):
        (q, q_cell), (kv, kv_cell) = divmod(q, size), divmod(kv, size)
        cells = [q_cell - window // 2 + i for i in range(window)]
        while cells[0] < 0:
            cells = [cell + 1 for cell in cells]
        while cells[-1] >= size:
            cells = [cell - 1 for cell in cells]
        if kv_cell not in cells:
            return False
    return True


def diffuses(seq_len: int, block: int, q: int, kv: int) -> bool:
    q_clean, q_block = q >= seq_len, (q % seq_len) // block
    kv_clean, kv_block = kv >= seq_len, (kv % seq_len) // block
    if not kv_clean:
        return not q_clean and q_block == kv_block
    return kv_block <= q_block if q_clean else kv_block < q_block


def prompted(offsets: Sequence[int], prefixes: Sequence[int], q: int, kv: int) -> bool:
    def owner(place: int) -> int:
        return next(d for d in range(len(prefixes)) if offsets[d] <= place < offsets[d + 1])

    if owner(q) == owner(kv):
        return kv <= q
    return owner(kv) == prefixes[owner(q)]


PARENTS = [-1, 0, 0, 1, 1, 2, -1, 6, 3, 8]
IS_GLOBAL = [i in (0, 7) for i in range(12)]
IDS = [3, 3, 3, 7, 7, 1, 1, 1, 1, 3, 3, 0]
BATCHED_IDS = [IDS, [0] * 5 + [-1] * 7]
PREFIXES = [0, 0, 0, 3, 3]
BOUNDS = [0, 3, 5, 7, 9, 12]

MASKS = [
    Case(mods.causal, lambda b, h, q, kv: q >= kv, "causal"),
    Case(mods.noop_mask, lambda b, h, q, kv: True, "noop_mask"),
    Case(mods.sliding_window(3), lambda b, h, q, kv: 0 <= q - kv <= 3, "sliding_window_3"),
    Case(mods.sliding_window(0), lambda b, h, q, kv: q == kv, "sliding_window_0"),
    Case(
        mods.dilated_sliding_window(4, 2),
        lambda b, h, q, kv: abs(q - kv) in (0, 2, 4),
        "dilated_sliding_window_4_dilation_2",
    ),
    Case(
        mods.global_sliding_window(2, torch.tensor(IS_GLOBAL)),
        lambda b, h, q, kv: abs(q - kv) <= 2 or IS_GLOBAL[q] or IS_GLOBAL[kv],
        "global_sliding_window_2",
    ),
    Case(mods.prefix_lm(4), lambda b, h, q, kv: kv < 4 or kv <= q, "prefix_lm_4"),
    Case(
        mods.padding([5, 0, 12]), lambda b, h, q, kv: kv < (5, 0, 12)[b], "padding", (3, 1, 4, 12)
    ),
    Case(mods.document(IDS), lambda b, h, q, kv: IDS[q] == IDS[kv], "document"),
    Case(
        mods.document(torch.tensor(BATCHED_IDS)),
        lambda b, h, q, kv: BATCHED_IDS[b][q] == BATCHED_IDS[b][kv],
        "document",
        (2, 1, 12, 12),
    ),
    Case(
        mods.document(lengths=[4, 0, 5, 3]),
        lambda b, h, q, kv: same_document([4, 0, 5, 3], q, kv),
        "document",
    ),
    Case(
        mods.document(offsets=torch.tensor([0, 4, 4, 9, 12])),
        lambda b, h, q, kv: same_document([4, 0, 5, 3], q, kv),
        "document",
    ),
    Case(
        mods.document(lengths=[4, 5, 3], mask_mod=mods.prefix_lm(2)),
        lambda b, h, q, kv: (
            same_document([4, 5, 3], q, kv) and (kv in (0, 1, 4, 5, 9, 10) or kv <= q)
        ),
        "document(prefix_lm_2)",
    ),
    Case(
        mods.document(BATCHED_IDS, mask_mod=mods.prefix_lm(1)),
        lambda b, h, q, kv: (
            BATCHED_IDS[b][q] == BATCHED_IDS[b][kv]
            and (kv <= q or kv == BATCHED_IDS[b].index(BATCHED_IDS[b][kv]))
        ),
        "document(prefix_lm_1)",
        (2, 1, 12, 12),
    ),
    Case(
        mods.shared_prefix(BOUNDS, PREFIXES),
        lambda b, h, q, kv: prompted(BOUNDS, PREFIXES, q, kv),
        "shared_prefix",
    ),
    Case(
        mods.shared_prefix(torch.tensor([0, 3, 5, 8]), torch.tensor([2, 2, 2], dtype=torch.uint8)),
        lambda b, h, q, kv: prompted([0, 3, 5, 8], [2, 2, 2], q, kv),
        "shared_prefix",
        (1, 1, 8, 8),
    ),
    Case(
        mods.tree(PARENTS),
        lambda b, h, q, kv: kv in ancestors(PARENTS, q),
        "tree_10",
        (1, 1, 10, 10),
    ),
    Case(
        mods.tree(torch.tensor(PARENTS), prefix_length=3),
        lambda b, h, q, kv: kv <= q if q < 3 else kv < 3 or kv - 3 in ancestors(PARENTS, q - 3),
        "tree_10_prefix_3",
        (1, 1, 13, 13),
    ),
    Case(
        mods.tree(PARENTS, prefix_length=torch.tensor([3, 0, 5])),
        lambda b, h, q, kv: (
            kv <= q
            and (kv < (p := (3, 0, 5)[b]) or min(kv - p, 9) in ancestors(PARENTS, min(q - p, 9)))
        ),
        "tree_10_prefix_tensor",
        (3, 1, 15, 15),
    ),
    Case(
        mods.tree([-1, 0], prefix_length=5),  # more prefix than tree
        lambda b, h, q, kv: kv <= q,
        "tree_2_prefix_5",
        (1, 1, 7, 7),
    ),
    Case(
        mods.neighbourhood(12, 5),
        lambda b, h, q, kv: in_window([12], [5], q, kv),
        "neighbourhood_12_k5",
    ),
    Case(
        mods.neighbourhood((3, 4), (3, 2)),
        lambda b, h, q, kv: in_window([3, 4], [3, 2], q, kv),
        "neighbourhood_3x4_k3x2",
    ),
    Case(
        mods.neighbourhood([2, 3, 4], [1, 2, 3]),
        lambda b, h, q, kv: in_window([2, 3, 4], [1, 2, 3], q, kv),
        "neighbourhood_2x3x4_k1x2x3",
        (1, 1, 24, 24),
    ),
    Case(
        mods.block_diffusion(6, 2),
        lambda b, h, q, kv: diffuses(6, 2, q, kv),
        "block_diffusion_6_2",
    ),
    Case(
        mods.block_diffusion(6, 4),  # the last block is shorter
        lambda b, h, q, kv: diffuses(6, 4, q, kv),
        "block_diffusion_6_4",
    ),
    Case(mods.not_mask(mods.causal), lambda b, h, q, kv: q < kv, "not_mask(causal)"),
    Case(
        mods.and_masks(
            mods.sliding_window(4), mods.document(IDS), mods.not_mask(mods.prefix_lm(2))
        ),
        lambda b, h, q, kv: False,
        "and_masks(sliding_window_4, document, not_mask(prefix_lm_2))",
    ),
    Case(
        mods.and_masks(mods.sliding_window(4), mods.document(IDS)),
        lambda b, h, q, kv: 0 <= q - kv <= 4 and IDS[q] == IDS[kv],
        "and_masks(sliding_window_4, document)",
    ),
    Case(
        mods.or_masks(mods.causal, mods.and_masks(mods.padding([5, 3]), mods.document(IDS))),
        lambda b, h, q, kv: kv <= q or (kv < (5, 3)[b] and IDS[q] == IDS[kv]),
        "or_masks(causal, and_masks(padding, document))",
        (2, 1, 12, 12),
    ),
    Case(
        mods.offset(mods.causal, 7),
        lambda b, h, q, kv: kv <= q + 7,
        "offset(causal, 7)",
        (1, 1, 5, 12),
    ),
    Case(
        mods.offset(mods.sliding_window(3), torch.tensor([7, 2])),
        lambda b, h, q, kv: 0 <= q + (7, 2)[b] - kv <= 3,
        "offset(sliding_window_3, tensor)",
        (2, 1, 5, 12),
    ),
    Case(
        mods.offset(mods.tree(PARENTS, prefix_length=4), torch.tensor(4)),
        lambda b, h, q, kv: kv < 4 or kv - 4 in ancestors(PARENTS, q),
        "offset(tree_10_prefix_4, tensor)",
        (1, 1, 10, 14),
    ),
]
each_mask = pytest.mark.parametrize("case", MASKS, ids=[case.name for case in MASKS])


def test_every_mask_has_a_meaning_in_plain_python() -> None:
    made = {value for value in PUBLIC if isinstance(value, mods.Mask)}
    makers = {value for value in PUBLIC if value not in made and returned(value) == "Mask"}
    names = {re.match(r"[a-z_]*[a-z]", case.name)[0] for case in MASKS}  # type: ignore[index]
    assert {value.__name__ for value in made | makers} <= names


def returned(function: Mod) -> object:
    return inspect.get_annotations(function).get("return")


@each_mask
@pytest.mark.parametrize("way", WAYS)
def test_a_mask_shows_what_a_double_loop_shows(case: Case, way: Callable[..., Tensor]) -> None:
    mask = way(case.mask, *positions(*case.sizes))
    assert mask.dtype == torch.bool
    assert torch.equal(mask, looped(case.plain, *case.sizes))


@each_mask
def test_a_mask_is_named_after_its_parameters(case: Case) -> None:
    assert case.mask.__name__ == case.name
    assert trace(case.mask, "mask").name == case.name


@each_mask
def test_a_mask_serves_pytorch_as_well(case: Case) -> None:
    B, H, L, S = case.sizes
    mask = theirs.create_mask(case.mask, B, H, L, S, device="cpu")
    assert torch.equal(mask, looped(case.plain, *case.sizes))


@st.composite
def forests(draw: st.DrawFn) -> list[int]:
    num_nodes = draw(st.integers(1, 12))
    return [draw(st.integers(-1, node - 1)) for node in range(num_nodes)]


@given(forests())
def test_any_forest(parents: list[int]) -> None:
    n = len(parents)
    expected = [[kv in ancestors(parents, q) for kv in range(n)] for q in range(n)]
    assert shown(mods.tree(parents), n, n).tolist() == expected


def test_a_walk_that_goes_around_many_times() -> None:
    n = 60_000
    mask = mods.tree([*[-1] * 3, *range(n - 3)])  # three chains, node by node
    ends = torch.cat([torch.arange(20), torch.arange(n - 20, n)])
    q_idx, kv_idx = ends.view(-1, 1), ends.view(1, -1)
    nothing = torch.zeros((), dtype=torch.int64)
    expected = (kv_idx <= q_idx) & (kv_idx % 3 == q_idx % 3)
    assert torch.equal(mask(nothing, nothing, q_idx, kv_idx), expected)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    documents = range(len(lengths))
    chosen = draw(st.lists(st.sampled_from(documents), min_size=1))
    prefixes = [d if d in chosen else draw(st.sampled_from(chosen)) for d in documents]
    return [0, *itertools.accumulate(lengths)], prefixes


@given(prompts())
def test_prompts_before_and_behind_what_continues_them(case: tuple[list[int], list[int]]) -> None:
    offsets, prefixes = case
    n = offsets[-1]
    expected = [[prompted(offsets, prefixes, q, kv) for kv in range(n)] for q in range(n)]
    mask = broadcast(mods.shared_prefix(offsets, prefixes), *positions(1, 1, n, n))
    assert mask[0, 0].tolist() == expected


@given(
    st.lists(
        st.integers(1, 5).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
        min_size=1,
        max_size=3,
    )
)
def test_every_query_has_a_whole_neighbourhood(axes: list[tuple[int, int]]) -> None:
    sizes, windows = zip(*axes, strict=True)
    n = math.prod(sizes)
    mask = shown(mods.neighbourhood(sizes, windows), n, n)
    assert mask.sum(dim=1).tolist() == [math.prod(windows)] * n
    assert mask.diagonal().all()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_ids_lengths_and_offsets_describe_the_same_documents(lengths: list[int]) -> None:
    n = sum(lengths)
    ids = [d for d, length in enumerate(lengths) for _ in range(length)]
    offsets = [0, *itertools.accumulate(lengths)]
    masks = [
        broadcast(mods.document(**given), *positions(1, 1, n, n))
        for given in ({"ids": ids}, {"lengths": lengths}, {"offsets": offsets})
    ]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


def test_documents_are_held_as_one_small_vector() -> None:
    (ids,) = trace(mods.document(lengths=[1000, 500]), "mask").captures
    assert ids.shape == (1500,)
    assert ids.dtype == torch.int32


def test_a_tree_is_held_as_vectors() -> None:
    captures = trace(mods.tree([-1, *range(999)]), "mask").captures
    assert {tuple(tensor.shape) for tensor in captures} == {(1000,)}


def test_tensors_are_captured_as_they_are() -> None:
    lengths, ids = torch.tensor([2]), torch.zeros(4, dtype=torch.int64)
    padding, document = mods.padding(lengths), mods.document(ids)
    lengths[0], ids[3] = 3, 1
    assert shown(padding, 1, 4).tolist() == [[True, True, True, False]]
    assert shown(document, 1, 4).tolist() == [[True, True, True, False]]
    q_offset = torch.tensor(0)
    moved = mods.offset(mods.causal, q_offset)
    q_offset += 2
    assert shown(moved, 1, 4).tolist() == [[True, True, True, False]]


# Composition


def test_composing_nothing() -> None:
    assert shown(mods.and_masks(), 2, 3).all()
    assert not shown(mods.or_masks(), 2, 3).any()
    assert mods.and_masks().__name__ == "and_masks()"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("constant", [True, False])
def test_members_may_return_python_bools(way: Callable[..., Tensor], constant: bool) -> None:
    def says(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> bool:
        return constant

    places = positions(1, 1, 3, 3)
    causal = way(mods.causal, *places)
    everywhere = torch.full_like(causal, constant)
    assert torch.equal(way(mods.and_masks(says), *places), everywhere)
    assert torch.equal(way(mods.or_masks(says, says), *places), everywhere)
    assert torch.equal(way(mods.not_mask(says), *places), ~everywhere)
    for masks in ((says, mods.causal), (mods.causal, says)):
        assert torch.equal(way(mods.and_masks(*masks), *places), causal & everywhere)
        assert torch.equal(way(mods.or_masks(*masks), *places), causal | everywhere)
    within = mods.document([0, 0, 1], mask_mod=says)
    together = way(mods.document([0, 0, 1]), *places)
    assert torch.equal(way(within, *places), together & everywhere)


def test_what_is_composed_need_not_be_ours() -> None:
    class Band:
        def __init__(self, width: int) -> None:
            self.width = width

        def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (q_idx - kv_idx).abs() <= self.width

    def at_most(most: int, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= most

    mask = mods.and_masks(Band(1), functools.partial(at_most, 2), trace(mods.causal, "mask"))
    assert mask.__name__ == "and_masks(Band, at_most, causal)"
    expected = looped(lambda b, h, q, kv: 0 <= q - kv <= 1 and kv <= 2, 1, 1, 5, 5)
    for way in WAYS:
        assert torch.equal(way(mask, *positions(1, 1, 5, 5)), expected)


def test_a_constant_leaves_nothing_in_the_graph() -> None:
    assert trace(mods.and_masks(mods.causal), "mask").output is trace(mods.causal, "mask").output


def test_offset_moves_keys_too() -> None:
    moved = mods.offset(mods.causal, torch.tensor([1, 4]), 2)
    assert moved.__name__ == "offset(causal, tensor, 2)"
    assert repr(moved) == "offset(mod=causal, q_offset=int64[2], kv_offset=2)"
    expected = looped(lambda b, h, q, kv: kv + 2 <= q + (1, 4)[b], 2, 1, 3, 5)
    for way in WAYS:
        assert torch.equal(way(moved, *positions(2, 1, 3, 5)), expected)
    with pytest.raises(
        ArgumentError, match=r"kv_offset must be a whole number, but is 0\.5\. Give"
    ):
        mods.offset(mods.causal, 1, 0.5)


# For parts of a call


def test_all_of_leaves_out_what_is_absent() -> None:
    assert all_of() is all_of(None, None) is None
    assert all_of(None, mods.causal) is mods.causal
    both = all_of(mods.causal, None, mods.sliding_window(1))
    assert both == mods.and_masks(mods.causal, mods.sliding_window(1))


def test_chain_leaves_out_what_is_absent_and_owns_nothing() -> None:
    cap, learned = mods.softcap(2), mods.LearnedAlibi(2)
    assert chain() is chain(None) is None
    assert chain(None, learned) is learned
    assert chain(cap, None, cap) == mods.in_turn(cap, cap)
    mixed = chain(cap, learned)
    assert type(mixed) is mods.ScoreChange
    assert mixed.__name__ == mods.in_turn(cap, learned).__name__
    args = [torch.randn(1, 2, 3, 4), *positions(1, 2, 3, 4)]
    assert torch.equal(vmapped(mixed, *args), vmapped(mods.in_turn(cap, learned), *args))
    with pytest.raises(NotCallableError, match=r"argument 2 of in_turn must be a mod, .* but is 7"):
        chain(cap, 7)


@pytest.mark.parametrize("q_offset", [3, torch.tensor(3), torch.tensor([3, -1])], ids=str)
def test_shift_is_offset_under_the_name_of_the_mod(q_offset: int | Tensor) -> None:
    args, scores = positions(2, 2, 3, 5), torch.randn(2, 2, 3, 5)
    for kv_offset in (0, -2, torch.tensor([1, 0])):
        moved = shift(mods.causal, "mask", q_offset, kv_offset)
        assert moved.__name__ == "causal"
        expected = vmapped(mods.offset(mods.causal, q_offset, kv_offset), *args)
        for way in WAYS:
            assert torch.equal(way(moved, *args), expected)
        score = shift(mods.alibi(2), "score", q_offset, kv_offset)
        expected = vmapped(mods.offset(mods.alibi(2), q_offset, kv_offset), scores, *args)
        assert torch.equal(vmapped(score, scores, *args), expected)


def test_shift_keeps_what_does_not_move() -> None:
    assert shift(None, "mask", 3, 4) is None
    assert shift(mods.causal, "mask", 0) is mods.causal
    assert shift(mods.causal, "mask", 0, 1) is not mods.causal
    assert shift(mods.causal, "mask", torch.tensor(0)) is not mods.causal  # may be overwritten


def test_shift_asks_no_signature() -> None:
    def anything(*args: Tensor) -> Tensor:
        *_, q_idx, kv_idx = args
        return q_idx >= kv_idx

    args = positions(1, 1, 3, 5)
    moved = shift(anything, "mask", 2)
    assert torch.equal(vmapped(moved, *args), vmapped(mods.offset(mods.causal, 2), *args))


def test_offset_moves_the_query_of_a_score_mod() -> None:
    moved = mods.offset(mods.alibi(8), 5)
    assert moved.__name__ == "offset(alibi_8, 5)"
    args = [torch.zeros(()), *positions(1, 1, 2, 7)]
    expected = looped(lambda b, h, q, kv: 0.5 * (kv - (q + 5)), 1, 1, 2, 7)
    for way in WAYS:
        assert torch.equal(way(moved, *args), expected)


def test_signatures_are_those_of_pytorch() -> None:
    for name in ("and_masks", "or_masks", "noop_mask"):
        ours = inspect.signature(getattr(mods, name)).parameters
        assert list(ours) == list(inspect.signature(getattr(theirs, name)).parameters)


# Scores


def bucket_in_t5(
    relative: Tensor, bidirectional: bool, num_buckets: int, max_distance: int
) -> Tensor:
    """The formula as the transformers library evaluates it, over a whole vector at once."""
    offset = torch.zeros_like(relative)
    if bidirectional:
        num_buckets //= 2
        offset = torch.where(relative > 0, num_buckets, 0)
        away = torch.abs(relative)
    else:
        away = torch.maximum(-relative, torch.zeros_like(relative))
    exact = num_buckets // 2
    log_steps = torch.log(away.float() / exact) / math.log(max_distance / exact)
    far = exact + (log_steps * (num_buckets - exact)).nan_to_num(neginf=0.0).to(torch.long)
    far = torch.minimum(far, torch.full_like(far, num_buckets - 1))
    return offset + torch.where(away < exact, away, far)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("num_buckets", "max_distance"),
    [(32, 128), (32, 20), (64, 256), (320, 800), (7, 9), (4, 4096), (32, 5000)],
)
def test_t5_buckets_are_exact(bidirectional: bool, num_buckets: int, max_distance: int) -> None:
    numbers = torch.arange(float(num_buckets))[:, None]
    mod = mods.relative_position_bias(numbers, bidirectional, max_distance)
    relative = torch.arange(-4096, 4097)
    zero = torch.tensor(0)
    buckets = mod(torch.zeros(()), zero, zero, zero, relative)
    expected = bucket_in_t5(relative, bidirectional, num_buckets, max_distance)
    assert torch.equal(buckets, expected.float())


def test_t5_buckets_at_known_distances() -> None:
    mod = mods.relative_position_bias(torch.arange(32.0)[:, None])
    zero = torch.tensor(0)
    relative = torch.tensor([0, -1, -7, -8, -11, -12, -16, -64, -127, -128, 1, 8, 1000])
    buckets = mod(torch.zeros(()), zero, zero, zero, relative)
    assert buckets.tolist() == [0, 1, 7, 8, 8, 9, 10, 14, 15, 15, 17, 24, 31]


class Score(NamedTuple):
    """A score_mod, its meaning in plain Python, and what it is called."""

    mod: Mod
    plain: Callable[[float, int, int, int, int], float]
    name: str


B, H, L, S = 2, 3, 5, 6
PAIRS = torch.randn(L, S, generator=torch.Generator().manual_seed(1))
FULL = torch.randn(B, H, L, S, generator=torch.Generator().manual_seed(2))
NEAR = torch.randn(H, 5, generator=torch.Generator().manual_seed(3))
BUCKETS = torch.randn(8, H, generator=torch.Generator().manual_seed(4))
SLOPES = torch.tensor([0.5, 0.0, -1.0])


def number(tensor: Tensor, *place: int) -> float:
    return float(tensor[place])


SCORES = [
    Score(
        mods.alibi(H),
        lambda score, b, h, q, kv: score + 2 ** (-8 * (h + 1) / H) * (kv - q),
        "alibi_3",
    ),
    Score(
        mods.alibi(H, SLOPES),
        lambda score, b, h, q, kv: score + (0.5, 0.0, -1.0)[h] * (kv - q),
        "alibi_3",
    ),
    Score(
        mods.softcap(1.5), lambda score, b, h, q, kv: 1.5 * math.tanh(score / 1.5), "softcap_1.5"
    ),
    Score(mods.softcap(30), lambda score, b, h, q, kv: 30 * math.tanh(score / 30), "softcap_30"),
    Score(
        mods.relative_position_bias(BUCKETS, max_distance=8),
        lambda score, b, h, q, kv: (
            score + number(BUCKETS, int(bucket_in_t5(torch.tensor(kv - q), True, 8, 8)), h)
        ),
        "relative_position_bias_8_8",
    ),
    Score(
        mods.relative_position_bias(BUCKETS, bidirectional=False, max_distance=128),
        lambda score, b, h, q, kv: score + number(BUCKETS, min(max(q - kv, 0), 4), h),
        "relative_position_bias_8_128_causal",
    ),
    Score(
        mods.table_bias(PAIRS),
        lambda score, b, h, q, kv: score + number(PAIRS, q, kv),
        "table_bias_5x6",
    ),
    Score(
        mods.table_bias(FULL[0]),
        lambda score, b, h, q, kv: score + number(FULL, 0, h, q, kv),
        "table_bias_3x5x6",
    ),
    Score(
        mods.table_bias(FULL),
        lambda score, b, h, q, kv: score + number(FULL, b, h, q, kv),
        "table_bias_2x3x5x6",
    ),
    Score(
        mods.table_bias(FULL[:, :1, :, :1]),
        lambda score, b, h, q, kv: score + number(FULL, b, 0, q, 0),
        "table_bias_2x1x5x1",
    ),
    Score(
        mods.distance_bias(NEAR),
        lambda score, b, h, q, kv: score + number(NEAR, h, 2 + max(-2, min(2, q - kv))),
        "distance_bias_2",
    ),
    Score(
        mods.distance_bias(NEAR[0]),
        lambda score, b, h, q, kv: score + number(NEAR, 0, 2 + max(-2, min(2, q - kv))),
        "distance_bias_2",
    ),
]
each_score = pytest.mark.parametrize("case", SCORES, ids=[case.name for case in SCORES])


@each_score
@pytest.mark.parametrize("way", WAYS)
def test_a_score_is_what_a_double_loop_gives(case: Score, way: Callable[..., Tensor]) -> None:
    scores = torch.linspace(-4, 4, B * H * L * S).view(B, H, L, S)
    changed = way(case.mod, scores, *positions(B, H, L, S))
    expected = looped(lambda *place: case.plain(number(scores, *place), *place), B, H, L, S)
    assert changed.dtype == torch.float32
    torch.testing.assert_close(changed, expected, rtol=1e-6, atol=1e-6)


@each_score
def test_a_score_mod_is_named_after_its_parameters(case: Score) -> None:
    assert case.mod.__name__ == case.name


LEARNED = [
    (lambda table: mods.alibi(H, table), (H,)),
    (mods.relative_position_bias, (8, H)),
    (mods.table_bias, (L, S)),
    (mods.table_bias, (B, 1, L, S)),
    (mods.distance_bias, (7,)),
    (mods.distance_bias, (H, 7)),
]


@pytest.mark.parametrize(("factory", "shape"), LEARNED)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_reach_what_is_learned(
    way: Callable[..., Tensor], factory: Callable[[Tensor], Mod], shape: tuple[int, ...]
) -> None:
    table = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    scores = torch.randn(B, H, L, S, dtype=torch.float64)
    weights = torch.randn(B, H, L, S, dtype=torch.float64)
    places = positions(B, H, L, S)

    def loss(entries: Tensor) -> Tensor:
        return (way(factory(entries), scores, *places) * weights).sum()

    (gradient,) = torch.autograd.grad(loss(table), table)
    # The loss is linear in the table: a step along each entry gives its derivative.
    steps = torch.eye(table.numel(), dtype=torch.float64).view(-1, *shape)
    with torch.no_grad():
        expected = torch.stack([loss(table + step) - loss(table) for step in steps]).view(shape)
    torch.testing.assert_close(gradient, expected)


def test_a_learned_table_is_captured_itself() -> None:
    table = torch.nn.Parameter(torch.randn(8, H))
    captures = trace(mods.relative_position_bias(table), "score").captures
    assert any(captured is table for captured in captures)


# Drawings

HEADER = re.compile(r"(?P<mod>\w+(\(.*\))?)( of scores (?P<scores>[-\d. ]+))?:")
ROW = re.compile(r"\s*-?\d+(\.\d)?( +-?\d+(\.\d)?)*")


class Drawing(NamedTuple):
    """What a docstring says a mod looks like."""

    mod: str
    scores: str | None
    rows: list[str]


def drawings(function: Mod) -> list[Drawing]:
    """The drawings in a docstring: the mod, a colon, an empty line, indented rows."""
    found, lines = [], inspect.cleandoc(function.__doc__ or "").splitlines()
    for below, line in enumerate(lines, 2):
        if header := HEADER.fullmatch(line):
            rows = [
                row.removeprefix("    ")
                for row in itertools.takewhile(ROW.fullmatch, lines[below:])
            ]
            found.append(Drawing(header["mod"], header["scores"], rows))
    return found


def redrawn(drawing: Drawing) -> list[str]:
    mod = eval(drawing.mod, {"torch": torch, **vars(mods)})
    places = positions(1, 1, len(drawing.rows), len(drawing.rows[0].split()))
    if len(inspect.signature(mod).parameters) == 4:
        return [" ".join(f"{x:d}" for x in row) for row in vmapped(mod, *places)[0, 0].tolist()]
    scores = torch.tensor([float(score) for score in (drawing.scores or "0").split()])
    changed = vmapped(mod, scores, *places)[0, 0]
    return [" ".join(f"{x + 0:4.1f}" for x in row) for row in changed.tolist()]


@pytest.mark.parametrize("function", PUBLIC)
def test_the_docstring_draws_the_mod(function: Mod) -> None:
    assert drawings(function), f"{function.__name__} has no drawing"
    for drawing in drawings(function):
        assert re.match(r"\w+", drawing.mod)[0] == function.__name__  # type: ignore[index]
        assert drawing.rows == redrawn(drawing), "\n".join(["it looks so:", *redrawn(drawing)])


def test_the_example_of_the_package() -> None:
    assert doctest.testmod(mods) == (0, 2)


def test_the_preorder_drawing() -> None:
    text = _preorder.__doc__ or ""
    drawn = {name: re.search(rf"{name} +([\d ]+)", text) for name in ("enter", "leave")}
    enter, leave = _preorder(torch.tensor([-1, 0, 0, 1, 1]))
    assert drawn["enter"] and drawn["enter"][1].split() == [str(x) for x in enter.tolist()]
    assert drawn["leave"] and drawn["leave"][1].split() == [str(x) for x in leave.tolist()]


# Errors


def asked(factory: Mod, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: factory(*args, **kwargs)


floats = torch.tensor([0.5, 1.5])
ERRORS: list[tuple[Callable[[], Any], type[QuireError], str]] = [
    (
        asked(mods.sliding_window, -1),
        ArgumentError,
        "window_size must be a whole number of at least 0, but is -1. "
        "Give how many positions away a query sees, not counting its own.",
    ),
    (asked(mods.sliding_window, 2.5), ArgumentError, "window_size .* but is 2.5. Give"),
    (asked(mods.sliding_window, True), ArgumentError, "window_size .* but is True. Give"),
    (asked(mods.dilated_sliding_window, -3, 1), ArgumentError, "window_size .* but is -3. Give"),
    (
        asked(mods.dilated_sliding_window, 4, 0),
        ArgumentError,
        "dilation .* at least 1, but is 0. Give 1",
    ),
    (
        asked(mods.global_sliding_window, -1, [True]),
        ArgumentError,
        "window_size .* but is -1. Give",
    ),
    (
        asked(mods.global_sliding_window, 1, torch.tensor([0, 1])),
        DtypeError,
        "is_global must hold truth values, but is int64. Give True",
    ),
    (
        asked(mods.global_sliding_window, 1, torch.ones(2, 2).bool()),
        ShapeError,
        r"is_global must be 1-D, but has shape \[2, 2\]. Give True",
    ),
    (asked(mods.prefix_lm, -1), ArgumentError, "prefix_length .* at least 0, but is -1. Give"),
    (
        asked(mods.padding, [3, -2]),
        ArgumentError,
        "lengths must be at least 0, but one is -2. Give",
    ),
    (asked(mods.padding, floats), DtypeError, "lengths must hold integers, but is float32. Give"),
    (asked(mods.padding, [[1]]), ShapeError, r"lengths .* but has shape \[1, 1\]. Give"),
    (
        asked(mods.padding, "many"),
        ArgumentError,
        "lengths must be a tensor or a sequence of integers",
    ),
    (
        asked(mods.document, lengths=[4, -1]),
        ArgumentError,
        "lengths must be at least 0, but one is -1",
    ),
    (
        asked(mods.document, offsets=[0, 4, 3]),
        ArgumentError,
        "offsets must not fall, but 4 is followed by 3 at position 2. Give where each document",
    ),
    (
        asked(mods.document, offsets=[1, 4]),
        ArgumentError,
        r"offsets must start at 0, but are \[1, 4\]. G",
    ),
    (
        asked(mods.document, offsets=[]),
        ArgumentError,
        r"offsets must start at 0, but are \[\]. Give",
    ),
    (
        asked(mods.document),
        ArgumentError,
        "one of ids, lengths and offsets, but is given none. Give ids",
    ),
    (
        asked(mods.document, [0, 0], lengths=[2]),
        ArgumentError,
        "one of ids, lengths and offsets, but is given ids and lengths. Give ids",
    ),
    (asked(mods.document, floats), DtypeError, "ids must hold integers, but is float32. Give"),
    (
        asked(mods.document, torch.zeros(1, 1, 1).int()),
        ShapeError,
        r"ids must be 1-D or 2-D, but has shape \[1, 1, 1\]. Give",
    ),
    (
        asked(mods.document, [0], mask_mod=3),
        ModError,
        "argument 1 of document must be a mod, .* but is 3. G",
    ),
    (asked(mods.shared_prefix, [0, 2, 1], [0, 0]), ArgumentError, "offsets must not fall"),
    (
        asked(mods.shared_prefix, [0, 2, 4], [0]),
        ShapeError,
        "prefix_document_id must have one entry for each of the 2 documents, but has 1. Give",
    ),
    (
        asked(mods.shared_prefix, [0, 2, 4, 6], [0, 0, 1]),
        ArgumentError,
        "continue only themselves, but is 1 for document 2. Give",
    ),
    (asked(mods.shared_prefix, [0, 2], [4]), ArgumentError, "but is 4 for document 0. Give"),
    (
        asked(mods.tree, [-1, 2, 1]),
        ArgumentError,
        "parent_indices must name an earlier node or -1, but is 2 for node 1. Order the nodes",
    ),
    (asked(mods.tree, [0]), ArgumentError, "but is 0 for node 0. Order"),
    (asked(mods.tree, [-2]), ArgumentError, "but is -2 for node 0. Order"),
    (
        asked(mods.tree, []),
        ArgumentError,
        "parent_indices must have at least one node, but has none. O",
    ),
    (asked(mods.tree, [[-1]]), ShapeError, r"parent_indices .* but has shape \[1, 1\]. Order"),
    (asked(mods.tree, [-1], prefix_length=-1), ArgumentError, "prefix_length .* but is -1. Give"),
    (
        asked(mods.tree, [-1], prefix_length=[4, -1]),
        ArgumentError,
        "prefix_length must be at least 0, but one is -1. Give the number of positions before the "
        "nodes",
    ),
    (
        asked(mods.LearnedAlibi, 0),
        ArgumentError,
        "num_heads .* but is 0. Give the heads of the query.",
    ),
    (asked(mods.LearnedDistanceBias, 2, -1), ArgumentError, "reach .* at least 0, but is -1. Give"),
    (
        asked(mods.LearnedRelativePositionBias, 2, 3),
        ShapeError,
        "table must have at least 4 buckets, .* but has 3. Give how many biases each head has.",
    ),
    (
        asked(mods.LearnedTableBias, 5),
        ShapeError,
        r"table must be 2-D or 3-D or 4-D, but has sizes \[5\]. Give the sizes L, S",
    ),
    (asked(mods.LearnedTableBias, 5, 0), ArgumentError, "a size .* at least 1, but is 0. Give"),
    (asked(mods.neighbourhood, 4, 0), ArgumentError, "kernel .* at least 1, but is 0. Give"),
    (
        asked(mods.neighbourhood, (4, 4), (3, 5)),
        ShapeError,
        r"none that is larger, but is \(3, 5\) for canvas \(4, 4\). Give a window for each "
        "dimension",
    ),
    (
        asked(mods.neighbourhood, (4, 4), 3),
        ShapeError,
        r"as many sizes as canvas .* but is \(3,\) for canvas \(4, 4\). Give",
    ),
    (
        asked(mods.neighbourhood, (1, 1, 1, 1), (1, 1, 1, 1)),
        ShapeError,
        r"canvas must have one to three sizes, but is \(1, 1, 1, 1\). Give",
    ),
    (asked(mods.block_diffusion, 0, 2), ArgumentError, "seq_len .* at least 1, but is 0. Give"),
    (asked(mods.block_diffusion, 4, 0), ArgumentError, "block_size .* at least 1, but is 0. Give"),
    (
        asked(mods.offset, mods.causal, 0.5),
        ArgumentError,
        "q_offset must be a whole number, but is 0.5. G",
    ),
    (
        asked(mods.offset, mods.causal, floats),
        DtypeError,
        "q_offset must hold integers, but is float32",
    ),
    (
        asked(mods.offset, mods.causal, torch.zeros(1, 1).int()),
        ShapeError,
        r"q_offset must be 0-D or 1-D, but has shape \[1, 1\]. Give",
    ),
    (asked(mods.offset, lambda q, kv: q, 1), ModError, "takes 2 positional arguments"),
    (asked(mods.alibi, 0), ArgumentError, "H must be a whole number of at least 1, but is 0. Give"),
    (asked(mods.alibi, 3, floats), ShapeError, "one entry for each of 3 heads, but has 2. Give"),
    (
        asked(mods.alibi, 2, torch.tensor([1, 2])),
        DtypeError,
        "slopes must hold floats, but is int64. G",
    ),
    (
        asked(mods.softcap, 0),
        ArgumentError,
        "soft_cap must be a finite number above 0, but is 0. Give",
    ),
    (asked(mods.softcap, True), ArgumentError, "soft_cap .* but is True. Give"),
    (asked(mods.softcap, math.nan), ArgumentError, "soft_cap .* but is nan. Give"),
    (asked(mods.softcap, math.inf), ArgumentError, "soft_cap .* but is inf. Give"),
    (asked(mods.softcap, "30"), ArgumentError, "soft_cap .* but is '30'. Give"),
    (
        asked(mods.relative_position_bias, floats),
        ShapeError,
        r"table must be 2-D, but has shape \[2\]. Give a float tensor \[num_buckets, H\]",
    ),
    (
        asked(mods.relative_position_bias, torch.zeros(3, 1)),
        ShapeError,
        "table must have at least 4 buckets, .* but has 3. Give",
    ),
    (
        asked(mods.relative_position_bias, torch.zeros(32, 1), max_distance=8),
        ArgumentError,
        "max_distance must be a whole number of at least 9, but is 8. With 32 buckets",
    ),
    (
        asked(mods.table_bias, floats),
        ShapeError,
        r"table must be 2-D or 3-D or 4-D, .* \[2\]. G",
    ),
    (
        asked(mods.table_bias, torch.zeros(2, 2).int()),
        DtypeError,
        "table must hold floats, but is int32",
    ),
    (asked(mods.table_bias, None), ArgumentError, "table must be a tensor or .* but is None. Give"),
    (
        asked(mods.distance_bias, floats),
        ShapeError,
        "table must have an odd number .* but has 2. Give",
    ),
    (
        asked(mods.distance_bias, torch.zeros(1, 1, 3)),
        ShapeError,
        r"but has shape \[1, 1, 3\]. Give",
    ),
]


@pytest.mark.parametrize(("ask", "kind", "message"), ERRORS, ids=[error[2] for error in ERRORS])
def test_a_bad_argument_is_named(
    ask: Callable[[], Any], kind: type[QuireError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        ask()


@pytest.mark.parametrize("compose", [mods.and_masks, mods.or_masks])
def test_what_cannot_be_called_is_refused_as_in_pytorch(compose: Mod) -> None:
    for module in (mods, theirs):
        with pytest.raises(RuntimeError):
            getattr(module, compose.__name__)(mods.causal, 7)
    message = (
        f"argument 2 of {compose.__name__} must be a mod, that is a function such as causal or "
        "sliding_window(256), but is 7. Give each mod as an argument of its own."
    )
    with pytest.raises(ModError, match=re.escape(message)):
        compose(mods.causal, 7)


# The names of attention-gym

OFFSETS = torch.tensor([0, 4, 9, 12])
GYM = [
    (attention_gym.causal_mask, mods.causal),
    (attention_gym.generate_sliding_window(window_size=3), mods.sliding_window(3)),
    (
        attention_gym.generate_dilated_sliding_window(window_size=4, dilation=2),
        mods.dilated_sliding_window(4, 2),
    ),
    (
        attention_gym.generate_global_sliding_window(1, torch.tensor(IS_GLOBAL)),
        mods.global_sliding_window(1, IS_GLOBAL),
    ),
    (attention_gym.generate_prefix_lm_mask(prefix_length=4), mods.prefix_lm(4)),
    (
        attention_gym.generate_doc_mask_mod(mods.prefix_lm(2), OFFSETS),
        mods.document(offsets=OFFSETS, mask_mod=mods.prefix_lm(2)),
    ),
    (
        attention_gym.generate_packed_causal_doc_mask_mod(OFFSETS),
        mods.and_masks(mods.causal, mods.document(offsets=OFFSETS)),
    ),
    (
        attention_gym.generate_shared_prefix_mask_mod(torch.tensor(BOUNDS), torch.tensor(PREFIXES)),
        mods.shared_prefix(BOUNDS, PREFIXES),
    ),
    (
        attention_gym.generate_block_diffusion_mask(seq_len=6, block_size=2),
        mods.block_diffusion(6, 2),
    ),
    (
        attention_gym.generate_natten(canvas_w=4, canvas_h=3, kernel_w=3, kernel_h=1),
        mods.neighbourhood((3, 4), (1, 3)),
    ),
]


@pytest.mark.parametrize(("gym", "ours"), GYM, ids=[ours.__name__ for _, ours in GYM])
def test_the_masks_of_attention_gym(gym: Mod, ours: Mod) -> None:
    assert torch.equal(shown(gym, 12, 12), shown(ours, 12, 12))


def test_the_score_mods_of_attention_gym() -> None:
    pairs = [
        (attention_gym.generate_alibi_bias(H), mods.alibi(H)),
        (attention_gym.generate_tanh_softcap(30, approx=True), mods.softcap(30)),
    ]
    args = [torch.randn(B, H, L, S), *positions(B, H, L, S)]
    for gym, ours in pairs:
        assert torch.equal(vmapped(gym, *args), vmapped(ours, *args))


def test_every_public_name_is_exported() -> None:
    for module in (mods.masks, mods.packed, mods.scores):  # type: ignore[attr-defined]
        for name, value in vars(module).items():
            own = getattr(value, "__module__", None) == module.__name__
            if callable(value) and own and name[0] != "_":
                assert getattr(mods, name) is value
                assert name in mods.__all__

"""Dropout depends on the seed and an element's position, and on nothing else."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from quire.errors import ArgumentError
from quire.ir.graph import key
from quire.ir.trace import Traced
from quire.ir.vectorise import evaluate
from quire.mods.dropout import Dropout, check_dropout, keep_mask

SIZES = (2, 3, 64, 96)


def kept(mask: Traced, *ranges: range) -> Tensor:
    """Where the mask holds, for ranges of b, h, q_idx and kv_idx."""
    indices = [torch.arange(each.start, each.stop) for each in ranges]
    shape = [len(each) for each in ranges]
    return evaluate(mask, "mask", *indices).expand(shape)


def whole(mask: Traced) -> Tensor:
    return kept(mask, *map(range, SIZES))


# Meaning


@pytest.mark.parametrize("p", [0, 0.0, False])
def test_no_dropout(p: float) -> None:
    assert check_dropout(p) is None


@pytest.mark.parametrize("p", [1, 1.0])
def test_nothing_is_kept(p: float) -> None:
    dropout = check_dropout(p)
    assert dropout is not None and dropout.factor == 0.0
    assert not whole(dropout.seeded(None).keep).any()


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan, math.inf, "0.1", None, torch.tensor(0.5)])
def test_probabilities_that_are_none(p: object) -> None:
    with pytest.raises(ArgumentError) as caught:
        check_dropout(p)
    assert str(caught.value) == (
        f"dropout_p must be a number from 0 to 1, but is {p!r}. Use 0.0 to switch it off."
    )


def test_the_expected_sum_stays() -> None:
    dropout = Dropout(0.25, (1, 2))
    assert dropout.factor == 1 / 0.75
    weights = torch.ones(SIZES)
    dropped = torch.where(whole(dropout.keep), weights * dropout.factor, 0.0)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.02)


# The seed


def test_the_same_seed_gives_the_same_mask() -> None:
    one, other = (Dropout(0.3).seeded(torch.Generator().manual_seed(7)).keep for _ in range(2))
    assert torch.equal(whole(one), whole(other))


def test_each_call_draws_another_seed() -> None:
    torch.manual_seed(3)
    first, second = (Dropout(0.5).seeded(None) for _ in range(2))
    assert first.seed != second.seed
    torch.manual_seed(3)
    assert Dropout(0.5).seeded(None).seed == first.seed


def test_a_generator_leaves_torch_s_own_alone() -> None:
    state = torch.get_rng_state()
    Dropout(0.5).seeded(torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_and_probabilities_share_one_graph() -> None:
    keys = {key(keep_mask(p, *seed).output) for p in (0.1, 0.7) for seed in ((1, 2), (3, -4))}
    assert len(keys) == 1


def test_the_mask_stays_what_it_is() -> None:
    """A checkpoint resumed with another version drops the same weights."""
    rows = kept(keep_mask(0.5, 1234, -5678), range(1), range(1), range(4), range(12))
    assert ["".join(".x"[int(bit)] for bit in row) for row in rows[0, 0]] == [
        "...x.x.xxx.x",
        "..x..xxxx.x.",
        "...x..xx...x",
        "...x.x..xxx.",
    ]


# Independence of tiles


@pytest.mark.parametrize("cut", [5, 16, 33])
def test_the_mask_does_not_depend_on_tiles(cut: int) -> None:
    mask = keep_mask(0.4, 11, 22)
    expected = whole(mask)
    pieces = [[range(k, min(k + cut, n)) for k in range(0, n, cut)] for n in SIZES[2:]]
    for queries, keys in itertools.product(*pieces):
        tile = kept(mask, range(2), range(3), queries, keys)
        part = expected[:, :, queries.start : queries.stop, keys.start : keys.stop]
        assert torch.equal(tile, part)


def test_positions_far_away() -> None:
    mask = keep_mask(0.5, 11, 22)
    far = kept(mask, range(1), range(1), range(2**20, 2**20 + 64), range(2**31, 2**31 + 64))
    assert 0.4 < far.float().mean().item() < 0.6


# Quality


def deviations(share: float, expected: float, count: int) -> float:
    """How many standard deviations a share is away from what is expected of it."""
    return abs(share - expected) / math.sqrt(expected * (1 - expected) / count)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_the_share_that_is_kept(p: float) -> None:
    mask = kept(keep_mask(p, 5, 6), range(2), range(4), range(256), range(512))
    assert deviations(mask.float().mean().item(), 1 - p, mask.numel()) < 4.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_are_independent(p: float) -> None:
    mask = kept(keep_mask(p, 5, 6), range(4), range(4), range(128), range(128))
    for axis in range(4):
        for step in (1, 2, 3):
            size = mask.shape[axis]
            one, other = mask.narrow(axis, 0, size - step), mask.narrow(axis, step, size - step)
            both = (one & other).float().mean().item()
            assert deviations(both, (1 - p) ** 2, one.numel()) < 5, f"axis {axis}, step {step}"


def test_rows_and_columns_are_balanced() -> None:
    mask = kept(keep_mask(0.5, 5, 6), range(1), range(1), range(512), range(512))[0, 0].float()
    for axis in (0, 1):
        worst = max(deviations(share, 0.5, 512) for share in mask.mean(axis).tolist())
        assert worst < 5


@pytest.mark.parametrize("other", [(5, 7), (6, 6), (6, 5), (-5, 6)])
def test_seeds_are_independent(other: tuple[int, int]) -> None:
    one, two = whole(keep_mask(0.5, 5, 6)), whole(keep_mask(0.5, *other))
    assert deviations((one == two).float().mean().item(), 0.5, one.numel()) < 5

"""Drawings as text, to the letter, and what cannot be drawn."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import quire
from quire import errors, mods
from quire.draw import Drawing, scale, subject


def rows(text: str) -> str:
    """A drawing as it stands in this file."""
    return "\n".join(line[4:] for line in text.strip("\n").splitlines()[:-1])


def test_elements() -> None:
    drawing = quire.draw(mods.sliding_window(2), 6)
    assert isinstance(drawing, Drawing)
    assert str(drawing) == repr(drawing)
    assert str(drawing) == rows(
        """
    sliding_window_2: 6 queries x 6 keys, sparsity 58.3 %
      0   2   4
    0 ██· · · · ·
      ████· · · ·
    2 ██████· · ·
      · ██████· ·
    4 · · ██████·
      · · · ██████
    ██ seen  · hidden
    """
    )


def test_blocks_with_a_short_last_one() -> None:
    assert str(quire.draw(mods.prefix_lm(300), 700, 1000)) == rows(
        """
    prefix_lm_300: 700 queries x 1,000 keys in blocks of 128, sparsity 51.3 %
        0     500
      0 ████▒▒· · · · ·
    200 ████▒▒· · · · ·
        ████▒▒· · · · ·
    400 ██████▒▒· · · ·
    600 ████████▒▒· · ·
        ██████████▒▒· ·
    ██ full  ▒▒ partial  · empty
    """
    )


def test_more_blocks_than_columns() -> None:
    assert str(quire.draw(mods.causal, 1 << 20, width=24)) == rows(
        """
    causal: 1,048,576 queries x 1,048,576 keys in blocks of 128, sparsity 50.0 %
         0       512k
       0 ▒▒· · · · · · ·
         ██▒▒· · · · · ·
    256k ████▒▒· · · · ·
         ██████▒▒· · · ·
    512k ████████▒▒· · ·
         ██████████▒▒· ·
    768k ████████████▒▒·
         ██████████████▒▒
    ██ full  ▒▒ partial  · empty  (a cell is 131,072 x 131,072 tokens)
    """
    )


def test_one_query() -> None:
    assert str(quire.draw(mods.offset(mods.sliding_window(200), 800), 1, 1000, width=40)) == rows(
        """
    offset(sliding_window_200, 800): 1 query x 1,000 keys in blocks of 128, sparsity 61.6 %
      0     500
    0 · · · · ▒▒██▒▒·
    ██ full  ▒▒ partial  · empty
    """
    )


def test_elements_take_one_column_each_where_two_do_not_fit() -> None:
    lines = str(quire.draw(mods.causal, 60)).splitlines()
    assert lines[2:-1] == [
        f"{'' if row % 16 else row:>2} {'█' * (row + 1)}{'·' * (59 - row)}" for row in range(60)
    ]


@pytest.mark.parametrize("width", [24, 30, 80, 200])
@pytest.mark.parametrize("lengths", [(5, 5), (70, 128), (128, 3), (1000, 90000), (130, 1 << 20)])
def test_the_width_is_kept(width: int, lengths: tuple[int, int]) -> None:
    _, *lines = str(quire.draw(mods.causal, *lengths, width=width)).splitlines()
    assert max(map(len, lines[:-1])) <= width
    assert len(lines) <= max(2 * width, 4)


# a block mask


def by_hand(kind: type[torch_flex.BlockMask]) -> torch_flex.BlockMask:
    """Rows that list [0] full; [1] full and [0] partial."""
    return kind.from_kv_blocks(
        torch.tensor([[[0, 1]]]),
        torch.tensor([[[[0, 0, 0], [0, 0, 0]]]]),
        torch.tensor([[[1, 1]]]),
        torch.tensor([[[[0, 0, 0], [1, 0, 0]]]]),
        BLOCK_SIZE=(4, 8),
        mask_mod=mods.causal,
    )


@pytest.mark.parametrize("kind", [quire.BlockMask, torch_flex.BlockMask])
def test_a_block_mask_is_drawn_as_it_is(kind: type[torch_flex.BlockMask]) -> None:
    assert str(quire.draw(by_hand(kind))) == rows(
        """
    causal: 8 queries x 24 keys in blocks of 4 x 8, sparsity 50.0 %
      0
    0 ██· ·
    4 ▒▒██·
    ██ full  ▒▒ partial  · empty
    """
    )


def test_the_batch_and_the_head_are_chosen() -> None:
    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx >= 128 * (2 * b + h)

    block_mask = quire.create_block_mask(mask, 2, 2, 512, 512)
    for b, h in ((0, 0), (0, 1), (1, 0), (1, 1)):
        of_mod, of_blocks = (
            str(quire.draw(each, *lengths, b=b, h=h))
            for each, lengths in (
                (mask, (512,)),
                (block_mask, ()),
            )
        )
        assert of_mod == of_blocks
        assert of_mod.count("▒▒") - 1 == 4 - 2 * b - h
    with pytest.raises(errors.ArgumentError, match=r"h must be below 2.*but is 2\. Choose one"):
        quire.draw(block_mask, h=2)


def test_a_block_mask_for_every_length() -> None:
    noop = torch_flex._create_empty_block_mask(torch.ones(1, 1, 5, 8), torch.ones(1, 1, 7, 8))
    assert "5 queries x 7 keys" in str(quire.draw(noop, 5, 7))


# numbers along an axis


@pytest.mark.parametrize(
    ("length", "labels"),
    [
        (1, "0 1"),
        (6, "0 2 4 6"),
        (64, "0 16 32 48 64"),
        (100, "0 20 40 60 80 100"),
        (1000, "0 200 400 600 800 1000"),
        (1410, "0 500 1000"),
        (4096, "0 1k 2k 3k 4k"),
        (2048, "0 512 1024 1536 2048"),
        (1 << 20, "0 256k 512k 768k 1M"),
        (1_000_000, "0 200k 400k 600k 800k 1M"),
        (5 << 20, "0 1M 2M 3M 4M 5M"),
    ],
)
def test_numbers_along_an_axis(length: int, labels: str) -> None:
    assert " ".join(label for _, label in scale.scale(length)) == labels


# mistakes


def unwritten(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.atan((q_idx - kv_idx).float()) >= 0


def branching(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx if q_idx > 3 else kv_idx > 3


BLOCKS = by_hand(quire.BlockMask)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (
            (lambda q_idx: q_idx, 8),
            {},
            errors.ModSignatureError,
            "takes 1 positional.*Give it 4 or 5",
        ),
        (
            (mods.alibi(2),),
            {},
            errors.ArgumentError,
            "q_len must be given for the score_mod 'alibi_2'.*Give",
        ),
        (
            (mods.alibi(2), 8),
            {"score": "3"},
            errors.ArgumentError,
            "score must be a number, but is '3'",
        ),
        ((mods.alibi(2), 8), {"h": 2}, errors.CapturedIndexError, "index 2 is out of bounds"),
        ((3, 8), {}, errors.NotCallableError, "Pass the function itself"),
        (
            (mods.causal,),
            {},
            errors.ArgumentError,
            "q_len must be given for the mask_mod 'causal'.*Give",
        ),
        ((mods.causal, 0), {}, errors.ArgumentError, "q_len must be a whole number of at least 1"),
        (
            (mods.causal, 8, -1),
            {},
            errors.ArgumentError,
            "kv_len must be a whole number of at least 1",
        ),
        ((mods.causal, 8), {"b": -1}, errors.ArgumentError, "b must be a whole number"),
        (
            (mods.causal, 8),
            {"width": 3},
            errors.ArgumentError,
            "width must be at least 24 .*but is 3.*80",
        ),
        ((mods.causal, 8), {"block_size": 0}, errors.ArgumentError, "BLOCK_SIZE"),
        (
            (mods.causal, 8),
            {"path": "mask.gif"},
            errors.ArgumentError,
            r"\.png or \.svg, but is 'mask",
        ),
        (
            (BLOCKS, 8, 25),
            {},
            errors.ArgumentError,
            r"block mask, \(8, 24\), but are \(8, 25\)\. Leave",
        ),
        ((BLOCKS._adjust(0, 8),), {}, errors.ArgumentError, r"but has lengths \(0, 8\)\. Draw"),
        ((branching, 8), {}, errors.TracedBranchError, r"write torch\.where"),
        (
            (unwritten, 8193, 8192),
            {},
            errors.ArgumentError,
            r"67,108,864 elem.*has 67,117,056.*atan",
        ),
        ((mods.padding([3]), 8), {"b": 1}, errors.CapturedIndexError, "index 1 is out of bounds"),
    ],
)
def test_mistakes(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        str(quire.draw(*arguments, **options))


def test_a_mask_without_a_graph_is_looked_at_everywhere() -> None:
    as_causal = str(quire.draw(unwritten, 300)).replace("unwritten", "causal")
    assert as_causal == str(quire.draw(mods.causal, 300))
    assert subject.MOST_ELEMENTS == 8192 * 8192

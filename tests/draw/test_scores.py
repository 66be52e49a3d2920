"""A score mod as a heat map: the values are those of the mod, and few of them are asked for."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import quire
from quire import errors, mods
from quire.draw import Drawing, scores
from quire.draw.drawing import ScoreDrawing

BIAS = torch.nn.Parameter(torch.arange(12.0).view(3, 4))


def tilted(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + kv_idx - q_idx


def after(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.where(q_idx >= kv_idx, score * 2 + kv_idx, -math.inf)


def unwritten(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + torch.atan((q_idx - kv_idx).float())


def learned(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + BIAS[h, kv_idx]


def broken(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.where(kv_idx == 0, torch.sqrt(score), torch.where(kv_idx == 1, math.inf, 5.0))


def drawn(mod: Any, *lengths: int, **options: Any) -> ScoreDrawing:
    drawing = quire.draw(mod, *lengths, **options)
    assert isinstance(drawing, ScoreDrawing) and isinstance(drawing, Drawing)
    return drawing


# The values


@pytest.mark.parametrize("mod", [tilted, after, unwritten, mods.softcap(3)])
def test_each_cell_is_what_the_mod_makes_of_the_score(mod: Any) -> None:
    found = drawn(mod, 9, 7, score=1.5).scores.cells((20, 20))
    index = torch.arange(9).view(-1, 1), torch.arange(7)
    zero = torch.zeros((), dtype=torch.int64)
    expected = mod(torch.full((9, 7), 1.5), zero, zero, *index)
    assert found.step == (1, 1)
    np.testing.assert_allclose(found.values, expected.double().numpy(), rtol=1e-6)


def test_the_batch_and_the_head_are_chosen_and_nothing_is_recorded() -> None:
    found = drawn(learned, 2, 4, h=2).scores.cells((20, 20)).values
    assert found.tolist() == [[8, 9, 10, 11]] * 2


def test_a_cell_shows_the_element_in_its_middle() -> None:
    found = drawn(tilted, 100, 50).scores.cells((10, 8))
    assert found.step == (10, 7)
    queries = np.arange(5, 100, 10)
    keys = np.array([3, 10, 17, 24, 31, 38, 45, 49])  # the last cell has one element
    assert (found.values == keys - queries[:, None]).all()


def test_a_million_tokens_take_few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    evaluate = scores.evaluate

    def counted(*args: Any, score: Tensor, **place: Tensor) -> Tensor:
        asked.append(score.numel())
        return evaluate(*args, score=score, **place)

    monkeypatch.setattr(scores, "evaluate", counted)
    assert "1,000,000 queries x 1,000,000 keys" in str(drawn(mods.alibi(8), 1_000_000))
    pytest.importorskip("matplotlib")
    assert drawn(mods.alibi(8), 1_000_000).png()
    assert len(asked) == 2 and max(asked) <= 512 * 512


# As text


def rows(text: str) -> str:
    """A drawing as it stands in this file."""
    return "\n".join(line[4:] for line in text.strip("\n").splitlines()[:-1])


def test_text() -> None:
    assert str(drawn(tilted, 4, 5)) == rows(
        """
    tilted: 4 queries x 5 keys, score 0 becomes -3 to 4
      0   2   4
    0 ▒▒▓▓▓▓████
    1 ▒▒▒▒▓▓▓▓██
    2 ░░▒▒▒▒▓▓▓▓
    3 ░░░░▒▒▒▒▓▓
    ░░ -3 to -1.25  ▒▒ -1.25 to 0.5  ▓▓ 0.5 to 2.25  ██ 2.25 to 4
    """
    )


def test_text_of_what_is_no_number() -> None:
    assert str(drawn(broken, 1, 4, score=-1)) == rows(
        """
    broken: 1 query x 4 keys, score -1 becomes 5 or inf or nan
      0   2
    0 ? ^ ████
    ██ 5  ^ inf  ? nan
    """
    )


def test_text_of_many_tokens() -> None:
    *drawing, legend = str(drawn(after, 1000, width=24)).splitlines()
    assert legend == (
        "░░ 56 to 280  ▒▒ 280 to 504  ▓▓ 504 to 728  ██ 728 to 952  · -inf  "
        "(one element of each 112 x 112)"
    )
    assert "\n".join(drawing) == rows(
        """
    after: 1,000 queries x 1,000 keys, score 0 becomes 56 to 952 or -inf
        0       500
      0 ░░· · · · · · · ·
    200 ░░░░· · · · · · ·
        ░░░░▒▒· · · · · ·
    400 ░░░░▒▒▒▒· · · · ·
        ░░░░▒▒▒▒▓▓· · · ·
    600 ░░░░▒▒▒▒▓▓▓▓· · ·
        ░░░░▒▒▒▒▓▓▓▓██· ·
    800 ░░░░▒▒▒▒▓▓▓▓████·
        ░░░░▒▒▒▒▓▓▓▓██████
    """
    )


def test_one_value_and_no_finite_one() -> None:
    assert str(drawn(mods.softcap(30), 2)).splitlines()[-1] == "██ 0"
    nothing = drawn(lambda score, b, h, q_idx, kv_idx: score * 0 - math.inf, 2)
    assert str(nothing).splitlines()[0].endswith("score 0 becomes -inf")
    assert str(nothing).splitlines()[-1] == "· -inf"


@pytest.mark.parametrize("width", [24, 30, 80])
@pytest.mark.parametrize("lengths", [(5, 5), (70, 128), (1000, 90000)])
def test_the_width_is_kept(width: int, lengths: tuple[int, int]) -> None:
    _, *lines, _ = str(drawn(tilted, *lengths, width=width)).splitlines()
    assert max(map(len, lines)) <= width


def test_a_mod_that_nothing_can_run() -> None:
    def branching(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score if q_idx > 3 else -score

    with pytest.raises(errors.TracedBranchError, match=r"write torch\.where"):
        quire.draw(branching, 8)


# As a picture


def dots(drawing: Drawing) -> Any:
    image = pytest.importorskip("matplotlib.image")
    return image.imread(io.BytesIO(drawing.png()))[..., :3]


def test_higher_is_blue_and_lower_is_orange_around_the_score() -> None:
    picture = pytest.importorskip("quire.draw.picture")
    shown = dots(drawn(tilted, 64, score=3.5))
    top, left = picture.TOP * 2, picture.LEFT * 2
    for row, column in ((8, 56), (56, 8), (30, 30)):
        red, _, blue = shown[top + 16 * row + 8, left + 16 * column + 8]
        assert np.sign(np.round(blue - red, 2)) == np.sign(column - row)


def test_what_is_no_number_has_a_colour_of_its_own_and_is_named() -> None:
    picture = pytest.importorskip("quire.draw.picture")
    drawing = drawn(after, 64)
    shown = dots(drawing)
    corner = shown[picture.TOP * 2 + 8, picture.LEFT * 2 + 16 * 60 + 8]
    assert np.allclose(corner * 255, list(bytes.fromhex(picture.SPECIAL["-inf"][1:])))
    words = re.findall(r"<text [^>]*>([^<]*)</text>", drawing.svg())
    assert "-inf" in words
    assert words[-2:] == ["after", "64 queries x 64 keys, score 0 becomes 0 to 63 or -inf"]


def test_a_bar_says_what_the_colours_are() -> None:
    pytest.importorskip("matplotlib")
    figure = drawn(tilted, 100, 40)._figure()
    (axes,) = figure.axes
    (bar,) = axes.child_axes
    assert bar.get_ylim() == (-99, 39)
    assert axes.get_xlim() == (0, 40) and axes.get_ylim() == (100, 0)


@pytest.mark.parametrize("mod", [mods.softcap(2), broken, lambda s, b, h, i, j: s * 0 - math.inf])
@pytest.mark.parametrize("score", [0.0, -1.0, math.inf])
def test_nothing_is_too_odd_to_be_drawn(mod: Any, score: float) -> None:
    pytest.importorskip("matplotlib")
    drawing = quire.draw(mod, 3, 5000, score=score)
    assert drawing.png().startswith(b"\x89PNG") and "</svg>" in drawing.svg()
    assert str(drawing)


def test_weights() -> None:
    weights = torch.eye(4).expand(1, 2, 4, 4) / 2
    assert str(quire.draw(weights, h=1)) == str(quire.draw(weights[0, 1]))
    title, *rows = str(quire.draw(weights)).splitlines()
    assert title == "weights: 4 queries x 4 keys, weights of 0 to 0.5"
    assert rows[1].count("█") == 2
    assert quire.draw(weights).png()


def test_a_cell_shows_its_largest_weight() -> None:
    weights = torch.zeros(3, 1000)
    weights[1, 777] = 1.0
    drawn = str(quire.draw(weights, width=60))
    assert "█" in drawn and "(the largest of each " in drawn


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        (
            torch.zeros(3),
            {},
            "weights must be [rows, S], or [B, Hq, rows, S] with b and h, but are [3]",
        ),
        (
            torch.zeros(2, 0),
            {},
            "weights must be [rows, S], or [B, Hq, rows, S] with b and h, but ",
        ),
        (torch.zeros(1, 2, 3, 4), {"h": 2}, "b and h must be below the sizes of the weights, "),
    ],
)
def test_weights_that_cannot_be_drawn(
    weights: torch.Tensor, options: dict[str, int], message: str
) -> None:
    with pytest.raises(quire.errors.ArgumentError) as caught:
        quire.draw(weights, **options)
    assert str(caught.value).startswith(message)

"""What a weight makes of a score, and what a prob_mod makes of a probability, as curves.

    python examples/weight_curves.py --out curves.svg

The curves are results of attention. A query of one number and a key of 1 have that number as their
score. With one key whose value is 1, the output is the weight itself. With a second key, whose
score and value are 0, the output is the probability of the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from charts import DARK, RULE, TIME, save
from torch import Tensor

import quire
from quire import Dense, weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WEIGHTS = {
    "exp": weights.exp,
    "squared_relu": weights.squared_relu,
    "softplus": weights.softplus,
    "relu": weights.relu,
    "sigmoid(0)": weights.sigmoid(0.0),
}


def keep_large(prob: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Leave keys out that have little of a query's attention."""
    return torch.where(prob > 0.3, prob, 0.0)


def sharpen(prob: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Make small probabilities smaller still."""
    return prob * prob


PROB_MODS = {"keep_large": keep_large, "sharpen": sharpen}


def weight_curve(weight: Callable[..., Tensor], scores: Tensor) -> Tensor:
    """Return the weight of each of the scores [N]."""
    query, one = scores.view(1, 1, -1, 1), torch.ones(1, 1, 1, 1)
    made = quire.attention(query, Dense(one, one), weight=weight, normalise=False)
    return made.flatten()


def prob_curve(prob_mod: Callable[..., Tensor], probs: Tensor) -> Tensor:
    """Return what the prob_mod makes of each of the probabilities [N]."""
    query = torch.logit(probs).view(1, 1, -1, 1)
    keys = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    return quire.attention(query, Dense(keys, keys), prob_mod=prob_mod).flatten()


def chart() -> Figure:
    """Return both panels."""
    from matplotlib.figure import Figure

    figure = Figure((7.5, 3.4), facecolor="white")
    left, right = figure.subplots(1, 2, gridspec_kw={"top": 0.88, "bottom": 0.15, "right": 0.97})
    scores, probs = torch.linspace(-3, 3, 241), torch.linspace(0.002, 0.998, 499)
    _draw(left, "score", "weight", scores, {n: weight_curve(w, scores) for n, w in WEIGHTS.items()})
    left.set_ylim(-0.1, 4)
    mods = {name: prob_curve(mod, probs) for name, mod in PROB_MODS.items()}
    _draw(right, "probability", "after prob_mod", probs, mods)
    return figure


def _draw(axes: Axes, x_name: str, y_name: str, x: Tensor, curves: dict[str, Tensor]) -> None:
    colours = [DARK, TIME, "#3b8f6b", "#8a5fb0", "#7a8794"]
    for (name, values), colour in zip(curves.items(), colours, strict=False):
        axes.plot(x, values, label=name, color=colour, linewidth=1.6)
    axes.set_xlabel(x_name)
    axes.set_title(y_name, loc="left", size="medium")
    axes.grid(color=RULE)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a file, .svg or .png")
    save(chart, parser.parse_args(arguments).out)


if __name__ == "__main__":
    main()

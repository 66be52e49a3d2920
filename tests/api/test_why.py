"""`quire.why`: every step of a mod, with the user's names, lines and values."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import quire
from quire import errors, mods
from quire.ir.trace import mod_kind

doc = torch.arange(64) // 5
table = torch.arange(24.0).view(2, 3, 4)
scalar = torch.tensor(0.5)


def same(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx <= q_idx) & (doc[q_idx] == doc[kv_idx])


def line_of(function: Any) -> int:
    """The number of a function's first line of code."""
    return int(function.__code__.co_firstlineno) + 1


def test_a_mask_with_a_captured_tensor() -> None:
    assert str(quire.why(same, 0, 0, 17, 3)) == (
        "same at b = 0, h = 0, q_idx = 17, kv_idx = 3\n"
        "\n"
        f"test_why.py:{line_of(same)}: return (kv_idx <= q_idx) & (doc[q_idx] == doc[kv_idx])\n"
        "    kv_idx <= q_idx                                  3 <= 17 = True\n"
        "    doc[q_idx]                                       doc[17] = 3\n"
        "    doc[kv_idx]                                      doc[3] = 0\n"
        "    doc[q_idx] == doc[kv_idx]                        3 == 0 = False\n"
        "    (kv_idx <= q_idx) & (doc[q_idx] == doc[kv_idx])  True & False = False\n"
        "\n"
        "same = False"
    )


def capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    distance = q_idx - kv_idx
    unused = distance * 3  # noqa: F841
    soft = torch.tanh(score / 20) * 20
    return torch.where(distance != 2, -soft, score - scalar * distance)


def test_a_score_mod_over_several_lines() -> None:
    found = quire.why(capped, 0, 1, 17, 15, 2.5)
    first = line_of(capped)
    assert (
        repr(found)
        == str(found)
        == (
            "capped at score = 2.5, b = 0, h = 1, q_idx = 17, kv_idx = 15\n"
            "\n"
            f"test_why.py:{first}: distance = q_idx - kv_idx\n"
            "    q_idx - kv_idx  17 - 15 = 2\n"
            "\n"
            f"test_why.py:{first + 2}: soft = torch.tanh(score / 20) * 20\n"
            "    score / 20.0               2.5 / 20.0 = 0.125\n"
            "    tanh(score / 20.0)         tanh(0.125) = 0.124353\n"
            "    tanh(score / 20.0) * 20.0  0.124353 * 20.0 = 2.48706\n"
            "\n"
            f"test_why.py:{first + 3}: return torch.where(distance != 2, -soft, "
            "score - scalar * distance)\n"
            "    (q_idx - kv_idx) == 2                2 == 2 = True\n"
            "    ~((q_idx - kv_idx) == 2)             ~True = False\n"
            "    -(tanh(score / 20.0) * 20.0)         -2.48706 = -2.48706\n"
            "    scalar                               scalar = 0.5\n"
            "    scalar * (q_idx - kv_idx)            0.5 * 2.0 = 1.0\n"
            "    score - (scalar * (q_idx - kv_idx))  2.5 - 1.0 = 1.5\n"
            "    where(~((q_idx - kv_idx) == 2), -(tanh(score / 20.0) * 20.0), ...)  "
            "where(False, -2.48706, 1.5) = 1.5\n"
            "\n"
            "capped = 1.5"
        )
    )
    assert found.value == 1.5 and found.inputs["score"] == 2.5


def test_composed_masks_show_the_lines_of_their_parts() -> None:
    found = quire.why(mods.and_masks(same, mods.sliding_window(8)), 0, 0, 17, 15)
    values = [(step.worked_out, step.value) for step in found.steps]
    assert values == [
        ("15 <= 17", True),
        ("doc[17]", 3),
        ("doc[15]", 3),
        ("3 == 3", True),
        ("True & True", True),
        ("17 - 15", 2),
        ("2 <= 8", True),
        ("True & True", True),
        ("True & True", True),
    ]
    places = [step.location[0].rpartition("/")[2] for step in found.steps if step.location]
    assert places == ["test_why.py"] * 5 + ["masks.py"] * 3 + ["compose.py"]
    assert str(found).endswith("\n\nand_masks(same, sliding_window_8) = True")


MODS = {
    "causal": mods.causal,
    "window": mods.sliding_window(4),
    "dilated": mods.dilated_sliding_window(6, 2),
    "document": mods.document(doc, mask_mod=mods.causal),
    "prefix": mods.prefix_lm(3),
    "padding": mods.padding([3, 9]),
    "not": mods.not_mask(mods.causal),
    "or": mods.or_masks(mods.causal, mods.sliding_window(2)),
    "tree": mods.tree([-1, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8]),
    "alibi": mods.alibi(3),
    "softcap": mods.softcap(20.0),
    "noop": mods.noop_mask,
}


@pytest.mark.parametrize("name", MODS)
def test_the_result_is_the_mods(name: str) -> None:
    mod = MODS[name]
    for b, h, q_idx, kv_idx in ((0, 0, 0, 0), (1, 2, 7, 4), (0, 1, 3, 8)):
        found = quire.why(mod, b, h, q_idx, kv_idx, 1.5)
        args: list[Any] = [torch.tensor(index) for index in (b, h, q_idx, kv_idx)]
        if mod_kind(mod) == "score":
            args.insert(0, torch.tensor(1.5))
        assert found.value == mod(*args).item()
        assert found.steps[-1].value == found.value


# names of captured tensors


class Bias(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(4.0))

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + self.weight[h]


class Holder:
    def __init__(self) -> None:
        self.ids = doc.clone()

    def mask(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.ids[q_idx] == 1

    __call__ = mask


def given(ids: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return ids[q_idx] == 1


def in_closure() -> Any:
    tables = {"one": [doc.clone()]}
    later: Tensor

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return tables["one"][0][q_idx] == 1 if True else later

    if q_len := 0:
        later = torch.tensor(q_len)
    return mask


def made_anew(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (doc + 1)[q_idx] == 1


@pytest.mark.parametrize(
    ("mod", "name"),
    [
        (lambda score, b, h, q, k: score + table[b, h, q], "table[0, 1, 2]"),
        (Bias(), "self.weight[1]"),
        (Holder().mask, "self.ids[2]"),
        (Holder(), "self.ids[2]"),
        (functools.partial(given, doc), "ids[2]"),
        (in_closure(), "tables['one'][0][2]"),
        (made_anew, "captured0[2]"),
    ],
)
def test_names(mod: Any, name: str) -> None:
    assert name in [step.worked_out for step in quire.why(mod, 0, 1, 2, 3).steps]


def test_a_mod_that_computes_nothing() -> None:
    found = quire.why(lambda score, b, h, q_idx, kv_idx: score, 0, 0, 1, 1, math.inf)
    assert str(found).splitlines()[2:] == ["<lambda> = inf"]


def test_without_source_the_place_is_told() -> None:
    names: dict[str, Any] = {}
    exec("def typed_in(b, h, q_idx, kv_idx): return q_idx >= kv_idx", names)
    assert "\n<string>:1\n    kv_idx <= q_idx  3 <= 1 = False\n" in str(
        quire.why(names["typed_in"], 0, 0, 1, 3)
    )


# mistakes


def branching(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx if q_idx > 3 else kv_idx > 3


@pytest.mark.parametrize(
    ("mod", "arguments", "error", "message"),
    [
        (same, (0, 0, 64, 3), errors.CapturedIndexError, r"index 64 .* at test_why\.py:\d+: `ret"),
        (same, (0, 0, -1, 3), errors.ArgumentError, "q_idx must be a whole number of at least 0"),
        (same, (0, 0, 1.5, 3), errors.ArgumentError, "q_idx must be a whole number"),
        (
            capped,
            (0, 0, 1, 3, "2"),
            errors.ArgumentError,
            "score must be a number, but is '2'. Give",
        ),
        (branching, (0, 0, 1, 3), errors.TracedBranchError, r"at test_why\.py:\d+: `return q_idx"),
        (3, (0, 0, 1, 3), errors.NotCallableError, "Pass the function itself"),
        (lambda a: a, (0, 0, 1, 3), errors.ModSignatureError, "Give it 4 or 5"),
    ],
)
def test_mistakes(
    mod: Any, arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quire.why(mod, *arguments)

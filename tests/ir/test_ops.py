"""The table of ops, and the tables that must have its keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from quire.errors import RandomModError
from quire.ir.forms import FORMS
from quire.ir.graph import walk
from quire.ir.interpret import LEAVES, MEANING
from quire.ir.ops import DTYPES, FLOAT, LEAF, OPS, WHERE
from quire.ir.simplify import RULES
from quire.ir.trace import SCORE_INPUTS, trace

SAMPLE_DTYPES = sorted(DTYPES, key=str)


def test_every_op_has_one_meaning() -> None:
    assert MEANING.keys() | LEAVES == OPS.keys()
    assert not MEANING.keys() & LEAVES
    assert {op.name for op in OPS.values() if op.typing is LEAF} == LEAVES


def test_rules_are_for_ops() -> None:
    assert RULES.keys() <= OPS.keys()


@pytest.mark.parametrize("name", MEANING)
@pytest.mark.parametrize("dtype", SAMPLE_DTYPES, ids=str)
def test_an_op_takes_what_torch_takes(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    assert op.arity is not None
    operands = [torch.ones(3, dtype=dtype)] * op.arity
    if op.typing is WHERE:
        operands[0] = torch.ones(3, dtype=torch.bool)
    if dtype not in op.typing.operands:
        if op.typing is FLOAT:
            assert MEANING[name](*operands).dtype == torch.get_default_dtype()
        else:
            with pytest.raises((RuntimeError, NotImplementedError)):
                MEANING[name](*operands)
        return
    result = MEANING[name](*operands)
    assert result.dtype == (torch.bool if name in ("lt", "le", "eq") else dtype)


# What can be written


def call(form: Callable[..., Any]) -> Any:
    """Calls a form with as many operands as it takes, integers or floats."""

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        condition, row = q_idx < kv_idx, torch.stack([score, score, score])
        tries = (
            (score,),
            (q_idx,),
            (q_idx, kv_idx),
            (score, b.float()),
            (score, condition, 1.0),
            (condition, score, 1.0),
            (score, torch.float64),
            (score, ()),
            (score, (), 1.0),
            (torch.arange(100), q_idx),
            (score, 0.5, False),
            (score, 0),
            (row,),
            ([row, row],),
            (torch.ones(3), row),
        )
        for operands in tries:
            try:
                return _first(form(*operands))
            except (
                TypeError,
                NotImplementedError,
                AssertionError,
                AttributeError,
                RandomModError,
            ):
                continue
        raise AssertionError("no way to call it")

    return mod


def _first(result: Any) -> Any:
    """A number of a result that may be a vector, or several."""
    while isinstance(result, tuple) or result.dim():
        result = result[0]
    return result


def test_every_op_can_be_written() -> None:
    written = {"const", "bits"}  # bounds alone write bits
    for form in FORMS.values():
        written |= {node.op for node in walk(trace(call(form), "score").output)}
    assert written == OPS.keys()


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_a_name_of_torch_or_an_operator(name: str) -> None:
    homes = (torch, torch.Tensor, F, torch.special, torch.linalg, torch._C._nn)
    assert any(hasattr(home, name) for home in homes) or hasattr(torch.Tensor, f"__{name}__")


def test_inputs_are_the_arguments_of_a_score_mod() -> None:
    assert SCORE_INPUTS == ("score", "b", "h", "q_idx", "kv_idx")

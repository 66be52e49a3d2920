"""From Python functions to graphs: what can be a mod, what it captures, and what it is told."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ir.oracle import SIZES, assert_traces_to_torch, scores
from torch import Tensor, nn

from quire.errors import (
    CapturedIndexError,
    ModResultError,
    ModSignatureError,
    ModValueError,
    NotCallableError,
    RandomModError,
    TracedBranchError,
    UnsupportedOpError,
)
from quire.ir.graph import Node, const, inputs, key, text, walk
from quire.ir.source import reading, user_location
from quire.ir.trace import Traced, call_name, check_signature, mod_kind, mod_name, trace
from quire.ir.vectorise import evaluate

B, H, L, S = SIZES
I64 = torch.int64


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.tanh(score / 20) * 20


# What can be a mod


def windowed(window: int, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx < window


def with_default(b: Any, h: Any, q_idx: Any, kv_idx: Any, window: int = 3) -> Any:
    return q_idx - kv_idx < window


def with_keyword(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, window: int = 3) -> Any:
    return q_idx - kv_idx < window


def variadic(*args: Any) -> Any:
    return args[2] - args[3] < 3


class Window:
    def __init__(self, window: int) -> None:
        self.window = window

    def mask(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx < self.window

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.mask(b, h, q_idx, kv_idx)

    @staticmethod
    def static(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx < 3


class WindowModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.tensor(3))

    def forward(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx < self.window


def closure(window: int) -> Callable[..., Any]:
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < window


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


MASKS: dict[str, Callable[..., Any]] = {
    "lambda": lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 3,
    "closure": closure(3),
    "default": with_default,
    "keyword default": with_keyword,
    "partial": functools.partial(windowed, 3),
    "partial by keyword": functools.partial(with_default, window=3),
    "partial of partial": functools.partial(functools.partial(windowed), 3),
    "bound method": Window(3).mask,
    "callable object": Window(3),
    "static method": Window.static,
    "module": WindowModule(),
    "module's forward": WindowModule().forward,
    "decorated": logged(closure(3)),
    "variadic": variadic,
    "trace": trace(closure(3), "mask"),
}


@pytest.mark.parametrize("mod", MASKS.values(), ids=MASKS.keys())
def test_every_kind_of_callable_is_a_mod(mod: Callable[..., Any]) -> None:
    if not isinstance(mod, Traced):
        assert_traces_to_torch(mod, "mask")
    traced = trace(mod, "mask")
    ready = evaluate(traced, "mask", *map(torch.arange, SIZES)).expand(SIZES)
    expected = torch.arange(L).view(-1, 1) - torch.arange(S) < 3
    assert torch.equal(ready, expected.expand(SIZES))
    if mod is not variadic:
        assert mod_kind(mod) == "mask"


def test_a_closure_is_read_at_every_call() -> None:
    window = 3

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx < window

    narrow = trace(mask, "mask")
    window = 5
    wide = trace(mask, "mask")
    assert narrow.output is not wide.output
    assert key(narrow.output) == key(wide.output)


def test_mod_kind_by_the_arguments_it_needs() -> None:
    assert mod_kind(causal) == "mask"
    assert mod_kind(softcap) == "score"
    assert mod_kind(with_default) == "mask"
    assert mod_kind(trace(softcap, "score")) == "score"

    class Scores:
        def bound(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score

    assert mod_kind(Scores().bound) == "score"  # six parameters, one of them taken


@pytest.mark.parametrize(
    ("mod", "name"),
    [
        (causal, "causal"),
        (functools.partial(functools.partial(windowed), 3), "windowed"),
        (Window(3).mask, "mask"),
        (Window(3), "Window"),
        (WindowModule(), "WindowModule"),
        (lambda b: b, "<lambda>"),
        (trace(causal, "mask"), "causal"),
    ],
)
def test_mod_name(mod: Callable[..., Any], name: str) -> None:
    assert mod_name(mod) == name
    assert call_name(None, mod, mod) == f"attention({name})"


def test_the_name_of_a_call_without_mods() -> None:
    assert call_name() == call_name(None, None) == "attention"


def message_of(error: type[Exception], function: Callable[..., object], *args: Any) -> str:
    """The message, with line numbers that this file may change hidden."""
    with pytest.raises(error) as caught:
        function(*args)
    return re.sub(r"(test_\w+\.py):\d+", r"\1:N", str(caught.value))


def test_a_wrong_number_of_arguments() -> None:
    assert message_of(ModSignatureError, check_signature, causal, "score") == (
        "score_mod must take 5 arguments (score, b, h, q_idx, kv_idx), but 'causal' takes 4. "
        "Change its signature."
    )
    assert message_of(ModSignatureError, check_signature, softcap, "mask") == (
        "mask_mod must take 4 arguments (b, h, q_idx, kv_idx), but 'softcap' takes 5. "
        "Change its signature."
    )
    assert message_of(ModSignatureError, mod_kind, lambda q, kv: q >= kv) == (
        "a mod must be a mask_mod(b, h, q_idx, kv_idx) or a score_mod(score, b, h, q_idx, kv_idx), "
        "but '<lambda>' takes 2 positional arguments. Give it 4 or 5."
    )


def test_a_keyword_without_default() -> None:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, *, window: int) -> Any:
        return q_idx - kv_idx < window

    assert message_of(ModSignatureError, trace, mask, "mask") == (
        "mask_mod must take 4 arguments (b, h, q_idx, kv_idx), but 'mask' needs window as well. "
        "Give it a default, or use functools.partial."
    )
    check_signature(functools.partial(mask, window=3), "mask")


def test_something_that_cannot_be_called() -> None:
    expected = "mask_mod must be a function of (b, h, q_idx, kv_idx), but is a Tensor. "
    advice = "Pass the function itself."
    assert message_of(NotCallableError, trace, torch.ones(3), "mask") == expected + advice
    assert message_of(NotCallableError, mod_kind, 3) == (
        "a mod must be a function of (score, b, h, q_idx, kv_idx), but is a int. " + advice
    )


def test_a_function_that_hides_its_signature_is_tried() -> None:
    check_signature(max, "mask")


# What it captures


def test_captures_in_the_order_of_their_first_use() -> None:
    one, other = torch.randn(H), torch.randn(L)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + other[q_idx] * one[h] + other[q_idx]

    traced = trace(mod, "score")
    assert len(traced.captures) == 2
    assert traced.captures[0] is other and traced.captures[1] is one


TABLE = torch.randn(B, H, L, S)
LOADS = {
    "all at once": "table[b, h, q_idx, kv_idx]",
    "one by one": "table[b][h][q_idx][kv_idx]",
    "in two steps": "table[b, h][q_idx, kv_idx]",
    "ellipsis first": "table[..., q_idx, kv_idx][b, h]",
    "ellipsis last": "table[b, h, ...][q_idx, kv_idx]",
    "ellipsis between": "table[b, ..., kv_idx][h, q_idx]",
    "ellipsis for nothing": "table[b, h, ..., q_idx, kv_idx]",
    "full slices": "table[:, h][b, :, kv_idx][q_idx]",
    "full slices at the end": "table[b, h, :, :][q_idx][kv_idx]",
    "last first": "table[:, :, :, kv_idx][b, h, q_idx]",
    "constants": "table[0, h, -1, kv_idx]",
    "a constant alone": "table[1][h][2][kv_idx]",
    "numpy's integers": "table[np.int64(1), h, q_idx, np.int32(2)]",
    "0-d tensors": "table[one, h, q_idx, kv_idx]",
    "negative": "table[b - 1, -h, q_idx - 5, -1 - kv_idx]",
    "arithmetic": "table[b % 2, (h + 1) % 3, q_idx // 2, (kv_idx * 3) % 7]",
    "int32": "table[b.int(), h.short(), q_idx.int() // 2, kv_idx.char()]",
    "transposed": "table.permute(3, 1, 0, 2)[kv_idx, h, b, q_idx]",
    "strided": "table[:, :, ::2, 1:][b, h, q_idx // 2, kv_idx // 2]",
    "expanded": "table[:1].expand(5, -1, -1, -1)[q_idx, h, q_idx, kv_idx]",
    "a vector": "table[0, 0, 0][kv_idx]",
    "an index that was loaded": "table[b, h, ids[kv_idx], ids[q_idx]]",
    "a row, iterated": "sum(table[b, h, q_idx])",
    "a row, unpacked": "(lambda x, y, z: x - y + z)(*table[b, :, q_idx, kv_idx])",
}


@pytest.mark.parametrize("source", LOADS.values(), ids=LOADS.keys())
def test_loads(source: str) -> None:
    scope = {
        "table": TABLE,
        "np": np,
        "one": torch.tensor(1),
        "ids": torch.randint(0, 5, (7,)),
    }
    mod = eval(f"lambda score, b, h, q_idx, kv_idx: score + {source}", scope)
    assert_traces_to_torch(mod, "score")


def test_different_ways_to_index_are_one_load() -> None:
    nodes = set()
    for source in list(LOADS.values())[:10]:
        mod = eval(f"lambda score, b, h, q_idx, kv_idx: {source}", {"table": TABLE})
        traced = trace(mod, "score")
        assert len(traced.captures) == 1 and traced.captures[0] is TABLE
        nodes.add(traced.output)
    assert len(nodes) == 1


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, I64, torch.float16],
    ids=str,
)
def test_loads_of_every_dtype(dtype: torch.dtype) -> None:
    table = (torch.randn(H, L) * 5).abs().to(dtype)
    assert_traces_to_torch(lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx], "score")


def test_documents() -> None:
    ids = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    assert_traces_to_torch(lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx], "mask")


def test_a_tensor_that_is_computed_inside_is_captured() -> None:
    slopes = torch.randn(H, requires_grad=True)
    traced = trace(lambda score, b, h, q_idx, kv_idx: score * slopes.exp()[h], "score")
    (captured,) = traced.captures
    assert captured.requires_grad and torch.equal(captured, slopes.exp())


def test_a_scalar_parameter_is_captured() -> None:
    scale = nn.Parameter(torch.tensor(2.0))
    traced = trace(lambda score, b, h, q_idx, kv_idx: score * scale, "score")
    assert traced.captures[0] is scale
    assert traced.output.args[1] is Node("load", (), torch.float32, 0)


@pytest.mark.parametrize(
    "mod",
    [
        lambda score, b, h, q_idx, kv_idx: SCALE.where(q_idx > kv_idx, score),
        lambda score, b, h, q_idx, kv_idx: SCALE.masked_fill(q_idx > kv_idx, 0.5) + score,
        lambda score, b, h, q_idx, kv_idx: SCALE.clamp(max=q_idx) + score,
        lambda score, b, h, q_idx, kv_idx: SCALE - score,
        lambda score, b, h, q_idx, kv_idx: torch.pow(SCALE, q_idx) + score,
    ],
)
def test_a_captured_scalar_may_come_first(mod: Callable[..., Any]) -> None:
    assert_traces_to_torch(mod, "score")


SCALE = torch.tensor(1.5)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (
            "table[b, h, q_idx, kv_idx, b]",
            CapturedIndexError,
            "5 indices for 4 dimensions of a captured tensor at <string>:1. Index each dimension "
            "once.",
        ),
        (
            "table[..., b, ...]",
            CapturedIndexError,
            "3 indices for 4 dimensions of a captured tensor at <string>:1. Index each dimension "
            "once.",
        ),
        (
            "table[b, h, q_idx / 2, kv_idx]",
            CapturedIndexError,
            "a captured tensor was indexed by a torch.float32 at <string>:1. Indices are signed "
            "integers: convert with .long(), or use torch.where for a condition.",
        ),
        (
            "table[b, h, q_idx > 1, kv_idx]",
            CapturedIndexError,
            "a captured tensor was indexed by a torch.bool at <string>:1. Indices are signed "
            "integers: convert with .long(), or use torch.where for a condition.",
        ),
        (
            "table[b, h, True, kv_idx]",
            CapturedIndexError,
            "a captured tensor was indexed by a torch.bool at <string>:1. Indices are signed "
            "integers: convert with .long(), or use torch.where for a condition.",
        ),
        (
            "torch.zeros_like(table[b])",
            UnsupportedOpError,
            "a mod computes with single numbers and vectors of up to 64, but a captured tensor of "
            "shape [3, 5, 7] takes part as a whole at <string>:1. The call still runs, on the "
            "slower eager path; to have it compiled index more of its dimensions, as in "
            "bias[h, q_idx].",
        ),
        (
            "table * q_idx",
            UnsupportedOpError,
            "a mod computes with single numbers and vectors of up to 64, but a captured tensor of "
            "shape [2, 3, 5, 7] takes part as a whole at <string>:1. The call still runs, on the "
            "slower eager path; to have it compiled index more of its dimensions, as in "
            "bias[h, q_idx].",
        ),
        (
            "table[b, h, 1:, kv_idx][q_idx]",
            UnsupportedOpError,
            "a slice of a captured tensor at a traced index has no row in quire's table of ops at "
            "<string>:1. The call still runs, on the slower eager path; to have it compiled write "
            "it with the ops of the table.",
        ),
        (
            "table[b, h, table, kv_idx]",
            UnsupportedOpError,
            "a single number is needed, but a captured tensor of shape [2, 3, 5, 7] takes part as "
            "a whole at <string>:1. Index all of its dimensions, as in bias[h, q_idx].",
        ),
        (
            "table[None, b, h, q_idx, kv_idx]",
            UnsupportedOpError,
            "indexing a captured tensor by None and a traced number has no row in quire's table of "
            "ops at <string>:1. The call still runs, on the slower eager path; to have it compiled "
            "write it with the ops of the table.",
        ),
        (
            "table[b, np.arange(3), q_idx]",
            UnsupportedOpError,
            "indexing a captured tensor by array([0, 1, 2]) and a traced number has no row in "
            "quire's table of ops at <string>:1. The call still runs, on the slower eager path; to "
            "have it compiled write it with the ops of the table.",
        ),
        (
            "table[[q_idx]]",
            UnsupportedOpError,
            "indexing a captured tensor by [Symbol(<Node input q_idx : int64>)] and a traced "
            "number has no row in quire's table of ops at <string>:1. The call still runs, on the "
            "slower eager path; to have it compiled write it with the ops of the table.",
        ),
        (
            "table.to(torch.complex64)[b, h, q_idx, kv_idx]",
            UnsupportedOpError,
            "a captured tensor of torch.complex64 and torch.strided has no row in quire's table of "
            "ops at <string>:1. The call still runs, on the slower eager path; to have it compiled "
            "write it with the ops of the table.",
        ),
    ],
)
def test_captured_tensors_that_are_misused(
    source: str, error: type[Exception], message: str
) -> None:
    mod = eval(
        f"lambda score, b, h, q_idx, kv_idx: {source}", {"table": TABLE, "torch": torch, "np": np}
    )
    assert message_of(error, trace, mod, "score") == message


# Python branches on traced values

BRANCH = (
    "a Python branch on a traced value at test_trace.py:N: `{line}`. A mod runs once for all "
    "elements, so Python cannot choose for each: write torch.where(condition, a, b), and & | ~ in "
    "place of and, or, not."
)
VALUE = (
    "the value of a traced number was asked for at test_trace.py:N: `{line}`. A mod runs once for "
    "all elements, so there is no single value: use tensor operations only; to index a Python "
    "list, make it a tensor first."
)


def test_a_python_if() -> None:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if q_idx > kv_idx:
            return h == 0
        return h == 1

    got = message_of(TracedBranchError, trace, mask, "mask")
    assert got == BRANCH.format(line="if q_idx > kv_idx:")


def test_the_line_is_the_right_one() -> None:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        shifted = q_idx + 1
        while shifted > kv_idx:
            shifted = shifted - 1
        return shifted

    with pytest.raises(TracedBranchError) as caught:
        trace(mask, "mask")
    assert f"test_trace.py:{mask.__code__.co_firstlineno + 2}: `while" in str(caught.value)


BRANCHES: dict[str, Callable[..., Any]] = {
    "and": lambda b, h, q_idx, kv_idx: q_idx > 1 and kv_idx > 1,
    "or": lambda b, h, q_idx, kv_idx: q_idx > 1 or kv_idx > 1,
    "not": lambda b, h, q_idx, kv_idx: not q_idx > kv_idx,
    "chained comparison": lambda b, h, q_idx, kv_idx: 0 <= q_idx - kv_idx < 3,
    "conditional expression": lambda b, h, q_idx, kv_idx: b == 0 if h > 1 else b == 1,
    "in a list": lambda b, h, q_idx, kv_idx: h in [0, 2],
    "max()": lambda b, h, q_idx, kv_idx: max(q_idx, kv_idx) > 3,
    "min()": lambda b, h, q_idx, kv_idx: min(q_idx, 3) > kv_idx,
    "sorted()": lambda b, h, q_idx, kv_idx: sorted([q_idx, kv_idx])[0] > 3,
    "any()": lambda b, h, q_idx, kv_idx: any([q_idx > 1, kv_idx > 1]),
    "assert": lambda b, h, q_idx, kv_idx: bool(q_idx >= 0),
}


@pytest.mark.parametrize("mod", BRANCHES.values(), ids=BRANCHES.keys())
def test_python_that_asks_for_a_truth_value(mod: Callable[..., Any]) -> None:
    line = inspect.getsource(mod).strip()
    assert message_of(TracedBranchError, trace, mod, "mask") == BRANCH.format(line=line)


NAMES = ["a", "b", "c"]
VALUES: dict[str, Callable[..., Any]] = {
    "int()": lambda b, h, q_idx, kv_idx: int(q_idx) > 3,
    "float()": lambda b, h, q_idx, kv_idx: float(q_idx) > 3,
    "complex()": lambda b, h, q_idx, kv_idx: complex(q_idx) == 3,
    "range()": lambda b, h, q_idx, kv_idx: range(q_idx),
    "a list's index": lambda b, h, q_idx, kv_idx: NAMES[h] == "a",
    "a slice of a list": lambda b, h, q_idx, kv_idx: NAMES[:h] == ["a"],
    "item()": lambda b, h, q_idx, kv_idx: q_idx.item() > 3,
    "tolist()": lambda b, h, q_idx, kv_idx: q_idx.tolist() > 3,
    "iteration": lambda b, h, q_idx, kv_idx: list(q_idx),
    "len()": lambda b, h, q_idx, kv_idx: len(q_idx) > 3,
    "in a number": lambda b, h, q_idx, kv_idx: 3 in q_idx,
    "math": lambda b, h, q_idx, kv_idx: math.sqrt(q_idx) > 2,
    "floor": lambda b, h, q_idx, kv_idx: math.floor(q_idx) > 2,
}


@pytest.mark.parametrize("mod", VALUES.values(), ids=VALUES.keys())
def test_python_that_asks_for_a_value(mod: Callable[..., Any]) -> None:
    line = inspect.getsource(mod).strip()
    assert message_of(TracedBranchError, trace, mod, "mask") == VALUE.format(line=line)


def test_branches_on_what_is_not_traced_are_fine() -> None:
    flip, sizes = True, [3, 5]

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        limit = max(sizes) if flip else 0
        result = q_idx < limit
        for size in sizes:
            result = result | (kv_idx == size)
        return result if q_idx is not None and q_idx.dim() == 0 else None

    assert_traces_to_torch(mask, "mask")


# What the table lacks

EAGER = (
    " at test_trace.py:N: `{line}`. The call still runs, on the slower eager path; to have it "
    "compiled write it with the ops of the table."
)
UNSUPPORTED: dict[str, Callable[..., Any]] = {
    "torch.atan has no row in quire's table of ops": lambda s, b, h, q, k: torch.atan(s),
    "Tensor.atan has no row in quire's table of ops": lambda s, b, h, q, k: s.atan(),
    "Tensor.add_ has no row in quire's table of ops": lambda s, b, h, q, k: s.add_(1),
    "Tensor.detach has no row in quire's table of ops": lambda s, b, h, q, k: s.detach(),
    "torch.flip has no row in quire's table of ops": (
        lambda s, b, h, q, k: torch.flip(torch.stack([q, k]), [0])
    ),
    "torch.tensor has no row in quire's table of ops": lambda s, b, h, q, k: torch.tensor(q),
    "this form of torch.mean has no row in quire's table of ops": (
        lambda s, b, h, q, k: torch.mean(s, out=torch.zeros(()))
    ),
    "this form of Tensor.round has no row in quire's table of ops": (
        lambda s, b, h, q, k: s.round(decimals=2)
    ),
    "and of torch.float32 has no row in quire's table of ops": lambda s, b, h, q, k: s & 1,
    "neg of torch.bool has no row in quire's table of ops": lambda s, b, h, q, k: -(q > k),
    "shl of torch.bool has no row in quire's table of ops": lambda s, b, h, q, k: (q > k) << True,
    "the negative power -1 of torch.int64 has no row in quire's table of ops": (
        lambda s, b, h, q, k: q**-1
    ),
    "where with a condition of torch.int64 has no row in quire's table of ops": (
        lambda s, b, h, q, k: torch.where(q, s, 0.0)
    ),
    "the value inf of torch.int64 has no row in quire's table of ops": (
        lambda s, b, h, q, k: torch.full_like(q, math.inf)
    ),
    "a value of torch.complex64 has no row in quire's table of ops": (
        lambda s, b, h, q, k: s.to(torch.complex64)
    ),
    "a copy to meta has no row in quire's table of ops": lambda s, b, h, q, k: s.to("meta"),
    "type('torch.LongTensor') has no row in quire's table of ops": (
        lambda s, b, h, q, k: s.type("torch.LongTensor")
    ),
    "a new tensor that is no scalar has no row in quire's table of ops": (
        lambda s, b, h, q, k: s.new_zeros(3)
    ),
    "clamp without a bound has no row in quire's table of ops": lambda s, b, h, q, k: s.clamp(),
    "indexing a single number has no row in quire's table of ops": lambda s, b, h, q, k: s[None],
    "an activation function of torch.int64 has no row in quire's table of ops": (
        lambda s, b, h, q, k: nn.functional.gelu(q)
    ),
}


@pytest.mark.parametrize(("reason", "mod"), UNSUPPORTED.items(), ids=UNSUPPORTED.keys())
def test_what_the_table_lacks(reason: str, mod: Callable[..., Any]) -> None:
    message = message_of(UnsupportedOpError, trace, mod, "score")
    assert message.startswith(f"{reason} at test_trace.py:N: `")
    assert message.endswith(EAGER.partition("`{line}`")[2])
    assert isinstance(UnsupportedOpError("x"), NotImplementedError)


def test_grad_mode_may_not_change_within_a_mod() -> None:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        with torch.no_grad():
            return score * 2

    assert message_of(UnsupportedOpError, trace, mod, "score").startswith(
        "torch.no_grad or torch.enable_grad inside a mod has no row in quire's table of ops at "
    )
    with torch.no_grad():
        trace(mod, "score")


def test_operands_that_are_no_numbers() -> None:
    mod = eval("lambda score, b, h, q_idx, kv_idx: score + {}")
    assert message_of(UnsupportedOpError, trace, mod, "score") == (
        "a dict cannot take part in a mod at <string>:1. Use numbers and tensors."
    )


MOD = "lambda score, b, h, q_idx, kv_idx: "


def traced(result: str) -> Traced:
    return trace(eval(MOD + result, {"np": np}), "score")


ARRAY = "Make it a tensor before, table = torch.from_numpy(array), and use that."


@pytest.mark.parametrize(
    ("operand", "what", "advice"),
    [
        ("score + 1j", "a complex number", "Compute with its real and imaginary part."),
        ("score + 2**70", "an integer of more than 64 bits", "Write it as a float."),
        ("(kv_idx < 2**70) * score", "an integer of more than 64 bits", "Write it as a float."),
        ("score + np.ones(3)", "an array of shape [3] of numpy", ARRAY),
        ("np.ones(3) * score", "an array of shape [3] of numpy", ARRAY),
        ("score + np.ones(3)[h]", "an array of numpy", ARRAY),
    ],
)
def test_operands_that_torch_cannot_take_either(operand: str, what: str, advice: str) -> None:
    mod = eval(f"lambda score, b, h, q_idx, kv_idx: {operand}", {"np": np})
    assert message_of(ModValueError, trace, mod, "score") == (
        f"a mod must compute with numbers of 64 bits and tensors, but uses {what} at <string>:1. "
        f"{advice}"
    )


def test_an_array_of_one_number_is_a_number() -> None:
    assert str(traced("score * np.array(2.5)")) == str(traced("score * 2.5"))


def test_a_function_of_numpy() -> None:
    assert message_of(ModValueError, trace, eval(MOD + "np.sin(score)", {"np": np}), "score") == (
        "a mod is written in torch's functions, but score_mod '<lambda>' uses one of numpy at "
        "<string>:1. Write torch. in place of np."
    )


@pytest.mark.parametrize(
    ("drawn", "name"),
    [
        ("torch.rand(())", "torch.rand"),
        ("torch.rand((), generator=torch.Generator())", "torch.rand"),
        ("torch.randn_like(score)", "torch.randn_like"),
        ("torch.bernoulli(torch.tensor(0.5))", "torch.bernoulli"),
        ("torch.bernoulli(score)", "torch.bernoulli"),
        ("torch.normal(score, 1.0)", "torch.normal"),
        ("torch.empty(()).uniform_()", "Tensor.uniform_"),
        ("score.bernoulli()", "Tensor.bernoulli"),
        ("score.normal_()", "Tensor.normal_"),
        ("torch.nn.functional.dropout(score)", "dropout"),
        ("torch.nn.Dropout(0.5)(score)", "dropout"),
    ],
)
def test_random_numbers(drawn: str, name: str) -> None:
    mod = eval(MOD + f"score + {drawn}", {"torch": torch})
    assert message_of(RandomModError, trace, mod, "score") == (
        f"a mod must return the same whenever it is called, but {name} draws random numbers at "
        "<string>:1. It would run once, and all elements would get the same number. Write "
        "quire.random(seed, b, h, q_idx, kv_idx), which gives each its own; to drop weights give "
        "dropout_p."
    )


def test_dropout_in_evaluation_does_nothing() -> None:
    dropout = torch.nn.Dropout(0.5).eval()
    mod = eval(MOD + "dropout(score) * 2", {"dropout": dropout})
    assert trace(mod, "score").output is traced("score * 2").output


def test_an_embedding_is_a_load() -> None:
    weight = torch.nn.Embedding(5, 3)
    names = {"weight": weight, "table": weight.weight, "torch": torch}
    expected = trace(eval(MOD + "score + table[kv_idx % 5, h]", names), "score")
    for row in (
        "weight(kv_idx % 5)",
        "torch.nn.functional.embedding(kv_idx % 5, table)",
        "torch.embedding(table, kv_idx % 5)",
    ):
        found = trace(eval(MOD + f"score + {row}[h]", names), "score")
        assert found.output is expected.output
        assert found.captures == (weight.weight,)


@pytest.mark.parametrize("option", ["padding_idx=-1", "max_norm=1.0", "scale_grad_by_freq=True"])
def test_an_embedding_that_is_more_than_a_load(option: str) -> None:
    names = {"weight": torch.nn.Embedding(5, 3), "torch": torch}
    row = f"torch.nn.functional.embedding(h, weight.weight, {option})"
    assert "an embedding with padding_idx" in message_of(
        UnsupportedOpError, trace, eval(MOD + f"score + {row}[0]", names), "score"
    )


def test_a_symbol_must_not_outlive_its_trace() -> None:
    kept: list[Any] = []

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kept.append(score)
        return score + kept[0]

    trace(mod, "score")
    assert message_of(UnsupportedOpError, trace, mod, "score").startswith(
        "a symbol that an earlier call of a mod left behind cannot take part in a mod at "
    )


def test_whatever_a_mod_raises_becomes_a_mod_error() -> None:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return {}["missing"]

    message = message_of(UnsupportedOpError, trace, mod, "score")
    assert message == (
        "score_mod 'mod' cannot be traced: KeyError: 'missing' at test_trace.py:N: `return "
        '{}["missing"]`. If PyTorch can run it, the call still runs, on the slower eager path.'
    )


# What it returns


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            None,
            "mask_mod '<lambda>' must return one scalar for each element, but returned NoneType. "
            "Is a return statement missing?",
        ),
        (
            [True],
            "mask_mod '<lambda>' must return one scalar for each element, but returned list. "
            "Return a single value.",
        ),
        (
            torch.ones(2, 3, dtype=torch.bool),
            "mask_mod '<lambda>' must return one scalar for each element, but returned a tensor of "
            "shape [2, 3]. Reduce or index it.",
        ),
        (
            1,
            "mask_mod '<lambda>' must return a truth value, but returned torch.int64. Compare, as "
            "in q_idx >= kv_idx, or convert with .bool().",
        ),
    ],
)
def test_wrong_results(result: object, message: str) -> None:
    mod = lambda b, h, q_idx, kv_idx: result  # noqa: E731
    assert message_of(ModResultError, trace, mod, "mask") == message


def test_a_row_is_no_result() -> None:
    mod = lambda score, b, h, q_idx, kv_idx: TABLE[b, h]  # noqa: E731
    assert message_of(ModResultError, trace, mod, "score") == (
        "score_mod '<lambda>' must return one scalar for each element, but returned a tensor of "
        "shape [5, 7]. Reduce or index it."
    )


def test_an_integer_is_no_mask() -> None:
    with pytest.raises(ModResultError, match="must return a truth value, but returned"):
        trace(lambda b, h, q_idx, kv_idx: q_idx, "mask")


@pytest.mark.parametrize("result", [True, False, np.True_, torch.tensor(True)])
def test_a_mask_may_be_constant(result: object) -> None:
    traced = trace(lambda b, h, q_idx, kv_idx: result, "mask")
    got = evaluate(traced, "mask", *map(torch.arange, SIZES))
    assert got.dtype == torch.bool and bool(got.all()) == bool(result)


@pytest.mark.parametrize("result", [2, 2.0, True, np.float32(2), torch.tensor(2)])
def test_a_score_may_be_constant(result: Any) -> None:
    traced = trace(lambda score, b, h, q_idx, kv_idx: result, "score", score_dtype=torch.float64)
    assert traced.output.dtype == torch.float64
    got = evaluate(traced, "score", *map(torch.arange, SIZES), score=torch.zeros(SIZES).double())
    assert (got == float(result)).all()


def test_a_score_is_converted_to_its_dtype() -> None:
    traced = trace(lambda score, b, h, q_idx, kv_idx: q_idx, "score")
    assert text(traced.output) == "%0 = input q_idx : int64\n%1 = cast %0 : float32"


# A trace is a mod


def biased(bias: Tensor) -> Callable[..., Any]:
    return lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, bias[h, kv_idx])


def assert_same_function(one: Traced, other: Traced) -> None:
    assert one.output is other.output
    assert (one.kind, one.name) == (other.kind, other.name)
    assert all(map(torch.equal, one.captures, other.captures))
    assert {node: one.where(node) for node in walk(one.output)} == {
        node: other.where(node) for node in walk(other.output)
    }


def test_a_trace_is_called_on_tensors_that_broadcast() -> None:
    traced = trace(causal, "mask")
    zero, rows, columns = torch.tensor(0), torch.arange(3).view(-1, 1), torch.arange(4)
    assert traced(zero, zero, rows, columns).tolist() == torch.ones(3, 4).tril().bool().tolist()
    assert traced(0, 0, 2, columns).tolist() == [True, True, True, False]


def test_a_trace_takes_the_arguments_of_its_kind() -> None:
    traced = trace(softcap, "score")
    assert list(inspect.signature(traced).parameters) == ["score", "b", "h", "q_idx", "kv_idx"]
    assert message_of(ModSignatureError, traced, 0, 0, 0, 0) == (
        "score_mod 'softcap' must be called with (score, b, h, q_idx, kv_idx), but is "
        "called with 4 arguments. Pass 5."
    )


def test_traces_compose() -> None:
    bias = torch.randn(H, S)
    inner = trace(biased(bias), "score")
    slope = torch.tensor(0.5)

    def outer(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return inner(score * slope, b, h, q_idx + 1, kv_idx) + bias[h, kv_idx]

    traced = trace(outer, "score")
    assert [capture is bias for capture in traced.captures] == [False, True]
    assert_traces_to_torch(outer, "score")


def test_a_trace_takes_numbers_and_tensors_among_symbols() -> None:
    ids = torch.randint(0, 2, (L,))
    inner = trace(lambda b, h, q_idx, kv_idx: (ids[q_idx] == b) & (h < kv_idx), "mask")
    zero = torch.tensor(0)
    traced = trace(lambda b, h, q_idx, kv_idx: inner(zero, 1, q_idx, kv_idx), "mask")
    assert inputs(traced.output) == {"q_idx", "kv_idx"}
    assert_traces_to_torch(lambda b, h, q_idx, kv_idx: inner(zero, 1, q_idx, kv_idx), "mask")


def test_composing_simplifies() -> None:
    inner = trace(lambda b, h, q_idx, kv_idx: q_idx - kv_idx < h * 2, "mask")
    traced = trace(lambda b, h, q_idx, kv_idx: inner(b, 3, q_idx, kv_idx), "mask")
    assert traced.output.args[1] is const(6, I64)


def test_a_trace_of_a_trace_numbers_its_captures_alike() -> None:
    table = torch.randn(H)
    once = trace(lambda score, b, h, q_idx, kv_idx: SCALE * table[h], "score")
    again = trace(once, "score")
    assert again.output is once.output
    assert all(map(lambda a, b: a is b, once.captures, again.captures))


def test_lines_survive_composition() -> None:
    bias = torch.zeros(H, 2)
    inner = trace(biased(bias), "score")
    traced = trace(lambda score, b, h, q_idx, kv_idx: inner(score, b, h, q_idx, kv_idx), "score")
    with pytest.raises(CapturedIndexError, match=r"bias\[h, kv_idx\]"):
        evaluate(traced, "score", *map(torch.arange, SIZES), score=torch.zeros(SIZES))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_trace_is_pickled(protocol: int) -> None:
    traced = trace(biased(torch.randn(H, S)), "score")
    assert_same_function(pickle.loads(pickle.dumps(traced, protocol)), traced)


def test_a_long_mask_is_pickled() -> None:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        result = q_idx == kv_idx
        for start in range(2_000):
            result = result | (q_idx - kv_idx == 3 * start)
        return result

    traced = trace(mask, "mask")
    assert_same_function(pickle.loads(pickle.dumps(traced)), traced)


def test_a_trace_is_copied_with_its_tensors() -> None:
    traced = trace(biased(torch.randn(H, S)), "score")
    assert copy.copy(traced).captures[0] is traced.captures[0]
    deep = copy.deepcopy(traced)
    assert deep.captures[0] is not traced.captures[0]
    assert_same_function(deep, traced)


def test_text_of_a_trace() -> None:
    traced = trace(causal, "mask")
    assert str(traced) == text(traced.output)
    assert traced.__name__ == "causal"


# Symbols


def test_a_symbol_answers_what_a_scalar_tensor_answers() -> None:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        assert score.dtype == torch.float64 and q_idx.dtype == I64
        assert score.device == torch.device("cpu")
        assert score.shape == score.size() == torch.Size([])
        assert score.dim() == score.ndim == 0 and score.numel() == 1
        assert score.is_floating_point() and not q_idx.is_floating_point()
        assert not score.requires_grad
        assert not hasattr(score, "no_such_attribute")
        assert (q_idx == None) is False and (q_idx != "a") is True  # noqa: E711
        assert repr(q_idx) == "Symbol(<Node input q_idx : int64>)"
        assert len({q_idx, kv_idx, q_idx}) == 2
        return score

    trace(mod, "score", score_dtype=torch.float64)


def test_tensors_are_made_where_the_mod_runs() -> None:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + torch.tensor(1.0, device=q_idx.device, dtype=score.dtype)

    assert_traces_to_torch(mod, "score")


def test_the_device_that_was_asked_for() -> None:
    seen = []
    meta = torch.device("meta")
    trace(lambda b, h, q, kv: seen.append(q.device) or q >= kv, "mask", device=meta)  # type: ignore[func-returns-value]
    assert seen == [meta]


def test_threads_trace_apart() -> None:
    tables = [torch.randn(H, S) for _ in range(4)]
    found: dict[int, list[Traced]] = {}

    def work(name: int) -> None:
        found[name] = [trace(biased(tables[name]), "score") for _ in range(50)]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, table in enumerate(tables):
        assert all(traced.captures[0] is table for traced in found[name])
    assert len({traced.output for traces in found.values() for traced in traces}) == 1


def test_threads_give_lines_apart() -> None:
    """Threads whose `reading` overlaps without one being inside of the other."""
    entered, left = threading.Event(), threading.Event()
    found: list[object] = []

    def other() -> None:
        with reading(("other.py", 2)):
            entered.set()
            left.wait(timeout=60)
            found.append(user_location())

    thread = threading.Thread(target=other)
    with reading(("mine.py", 1)):
        thread.start()
        entered.wait(timeout=60)
        assert user_location() == ("mine.py", 1)
    left.set()
    thread.join()
    assert found == [("other.py", 2)]
    assert user_location()[0] != "mine.py"


def test_a_mod_that_fails_leaves_torch_as_it_was() -> None:
    with pytest.raises(TracedBranchError):
        trace(BRANCHES["and"], "mask")
    assert torch.overrides._get_current_function_mode() is None


def test_scores_in_other_dtypes() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert_traces_to_torch(
            lambda score, b, h, q_idx, kv_idx: score * 2 + 0.1, "score", scores(dtype=dtype)
        )

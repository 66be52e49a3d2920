"""PyTorch's own flex_attention as a backend.

Tests marked slow compile with a C++ compiler, 5 to 40 seconds each; the others compile nothing.
"""

from __future__ import annotations

import math
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare import assert_as_good_as
from torch import Tensor

import quire
from quire import reference
from quire.backends import inductor
from quire.backends.inductor import obstacle, with_mask, with_sink
from quire.errors import BackendError
from quire.memory import Dense, One, Placed, Queries
from quire.plans import CallPlan
from quire.request import Call, Problem, Request, checked_call


def qkv(**kind: Any) -> list[Tensor]:
    return [torch.randn(1, 2, 8, 4, **kind) for _ in range(3)]


def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Call:
    return checked_call(Request(query, Dense(key, value), **options))


# What it cannot do


def test_nothing_stands_in_the_way() -> None:
    assert obstacle(call(*qkv())) is None
    assert obstacle(call(*qkv(dtype=torch.bfloat16), score_mod=lambda s, b, h, q, k: s)) is None


def learned(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + SLOPES[h]


SLOPES = torch.zeros(2, requires_grad=True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout_p": 0.1}, "has no dropout, and dropout_p is not 0"),
        ({"aux": quire.AuxRequest(lse=True)}, "on cpu does not return lse"),
        ({"aux": quire.AuxRequest(max_scores=True)}, "on cpu does not return max_scores"),
        ({"aux": quire.AuxRequest(argmax=True)}, "does not return argmax"),
        ({"aux": quire.AuxRequest(lse=True, entropy=True)}, "does not return entropy"),
        ({"aux": quire.AuxRequest(key_mass=True)}, "does not return key_mass"),
        ({"sink": torch.zeros(2)}, "on cpu does not return lse, which a sink needs"),
        (
            {"score_mod": learned},
            "on cpu has no backward pass, and these require grad: a captured tensor",
        ),
    ],
)
def test_on_the_cpu_it_lacks(options: dict[str, Any], reason: str) -> None:
    assert obstacle(call(*qkv(), **options)) == f"PyTorch's flex_attention {reason}"


def test_on_the_cpu_it_lacks_dtypes() -> None:
    query, key, value = qkv()
    assert obstacle(call(*qkv(dtype=torch.float64))) == (
        "PyTorch's flex_attention on cpu does not take float64"
    )
    assert obstacle(call(query, key.bfloat16(), value)) == (
        "PyTorch's flex_attention on cpu takes one dtype, and these are float32, bfloat16, float32"
    )


def test_on_the_cpu_it_needs_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    assert "needs AVX2" in str(obstacle(call(*qkv())))


def test_empty_sequences() -> None:
    query, key, value = qkv()
    for arguments in ((query[:, :, :0], key, value), (query, key[:, :, :0], value[:, :, :0])):
        assert "no sequences of length 0" in str(obstacle(call(*arguments)))


def test_gradients_matter_only_where_they_are_recorded() -> None:
    operands = qkv(requires_grad=True)
    assert "these require grad: query, key, value" in str(obstacle(call(*operands)))
    with torch.no_grad():
        assert obstacle(call(*operands)) is None


@pytest.mark.parametrize(
    ("device", "can_learn"), [("cuda", True), ("xpu", True), ("hpu", True), ("mps", False)]
)
def test_other_devices(device: str, can_learn: bool) -> None:
    tensor: Any = SimpleNamespace(
        device=torch.device(device),
        dtype=torch.float64,
        shape=torch.Size((1, 2, 8, 4)),
        requires_grad=True,
    )
    placed = Placed(tensor, tensor, tensor, One(8, 0, 0, 8))

    def there(**options: Any) -> Call:
        return Call(Request(tensor, Dense(tensor, tensor), **options), placed, Problem(1.0), ())

    for options in ({}, {"aux": quire.AuxRequest(lse=True)}, {"sink": tensor}):
        assert (obstacle(there(**options)) is None) == can_learn  # type: ignore[arg-type]
    reason = obstacle(there(aux=quire.AuxRequest(argmax=True)))
    assert reason == "PyTorch's flex_attention does not return argmax"


@pytest.mark.parametrize("entry", ["flex_attention", "attention"])
def test_what_it_does_not_return_is_an_error_and_never_none(entry: str) -> None:
    query, key, value = qkv()
    arguments: tuple[Any, ...] = (
        (query, key, value) if entry == "flex_attention" else (query, Dense(key, value))
    )
    with pytest.raises(BackendError, match="does not return lse"):
        getattr(quire, entry)(*arguments, return_aux=quire.AuxRequest(lse=True), backend="inductor")


# What it says in PyTorch's words


def test_a_mask_becomes_part_of_the_score() -> None:
    numbers = [torch.tensor(n) for n in (0, 0, 3, 2)]

    def double(score: Tensor, *_: Tensor) -> Tensor:
        return score * 2

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    assert with_mask(double, None) is double
    for mod, mask, expected in (
        (double, causal, 10.0),
        (None, causal, 5.0),
        (double, lambda *_: True, 10.0),
        (double, lambda *_: False, -math.inf),
        (None, lambda b, h, q_idx, kv_idx: q_idx < kv_idx, -math.inf),
    ):
        both = with_mask(mod, mask)
        assert both is not None
        assert both(torch.tensor(5.0), *numbers).item() == expected


def test_a_sink_joins_by_the_log_sum_exp() -> None:
    query, key, value = qkv(dtype=torch.float64)
    sink = torch.tensor([0.5, -math.inf], dtype=torch.float64)

    def half(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx > 3) & (q_idx >= kv_idx)  # the first rows are empty

    without = reference.attention(query, key, value, mask_mod=half)
    expected = reference.attention(query, key, value, mask_mod=half, sink=sink)
    out, lse = with_sink(without.out, without.lse, sink)
    torch.testing.assert_close(out, expected.out)
    torch.testing.assert_close(lse, expected.lse)


# What PyTorch compiles. It warns of parts of itself that it deprecates.

compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


@pytest.fixture
def _no_kernels() -> Iterator[None]:
    """No kernel from an earlier test, and none for a later one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("_no_kernels")
@compiles
def test_the_same_numbers() -> None:
    """All at once, since each compilation takes its time: both mods, a block mask, groups of
    heads, keys for all batches, positions, an empty row, gradients that are not recorded."""
    query = torch.randn(2, 4, 40, 16, requires_grad=True)
    key, value = torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)
    slopes = torch.randn(4)

    def slope(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (q_idx - kv_idx)

    def hidden(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx != 12)

    blocks = quire.create_block_mask(lambda b, h, q, k: k > 5, None, None, 40, 50, BLOCK_SIZE=16)

    def run(backend: Any, dtype: torch.dtype) -> Tensor:
        request = Request(
            query.to(dtype),
            Dense(key.to(dtype), value.to(dtype), start=3),
            Queries(start=7),
            score_mod=slope,
            masks=(hidden, blocks),
            scale=0.3,
        )
        checked = checked_call(request)
        return CallPlan(checked, backend).run(checked).out

    with torch.no_grad():
        actual = run("inductor", torch.float32)
        peer, truth = run("eager", torch.float32), run("eager", torch.float64)
    assert_as_good_as(actual, peer, truth)
    assert actual[:, :, 5].eq(0).all()  # position 12


@pytest.mark.slow
@pytest.mark.usefixtures("_no_kernels")
@compiles
@pytest.mark.filterwarnings("ignore:.*force disabled")
def test_no_compiler() -> None:
    from torch._inductor import config

    with (
        config.patch({"cpp.cxx": ("no++",), "force_disable_caches": True}),
        pytest.raises(BackendError) as caught,
    ):
        quire.flex_attention(*qkv(), backend="inductor")
    message = str(caught.value)
    assert message.startswith(
        "backend='inductor' needs a C++ compiler on the CPU, but PyTorch says"
    )
    assert message.endswith("name it in the variable CXX, or use backend='eager'.")


EMPTY = """
import torch
from torch.nn.attention.flex_attention import flex_attention

query, keys = (torch.randn(1, 2, length, 16) for length in ({queries}, {keys}))
torch.compile(flex_attention)(query, keys, keys)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)  # a process that imports and compiles by itself
@pytest.mark.skipif(platform.machine() != "x86_64", reason="others divide integers by 0")
@pytest.mark.parametrize(("queries", "keys"), [(0, 8), (8, 0)])
def test_pytorch_ends_the_process_for_empty_sequences(queries: int, keys: int) -> None:
    """Why these never reach it. docs/differences.md names the versions that do so."""
    program = EMPTY.format(queries=queries, keys=keys)
    alone = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no processes that compile ahead
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, env=alone)
    assert run.returncode == -signal.SIGFPE, run.stderr


@pytest.mark.usefixtures("_no_kernels")
@compiles
def test_a_mod_that_pytorch_cannot_compile() -> None:
    def branching(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score if bool(score > 0) else score * 2

    operands = call(*qkv())
    operands = operands._replace(request=operands.request._replace(score_mod=branching))
    with pytest.raises(BackendError) as caught:
        inductor.attention(operands)
    message = str(caught.value)
    assert message.startswith(
        "backend='inductor' needs mods that PyTorch can compile, but it raise"
    )
    assert message.endswith("Change the mod, or use backend='eager' on the CPU.")

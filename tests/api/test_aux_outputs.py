"""The results for each row besides the output: argmax and entropy, on every path.

The mass of keys has a number for each key, and is tested in test_key_mass.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_as_good_as
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import quire
from quire import AuxOutput, AuxRequest, Dense, attention, create_block_mask, mods, reference
from quire.aux_outputs import checked_request
from quire.codegen.convention import OBSERVE, Form
from quire.codegen.llvm import jit
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, F64
from quire.codegen.phases.observe import write_observe
from quire.codegen.phases.tiles import TileShape
from quire.config import Backend, config
from quire.errors import KernelMismatchError, OptionError
from quire.reference import Reference
from quire.runtime import launch as launcher
from quire.runtime import prepare
from quire.runtime.forward import ForwardPlan

BOTH = AuxRequest(argmax=True, entropy=True)
ALL = AuxRequest(lse=True, max_scores=True, argmax=True, entropy=True)
BACKENDS: list[Backend] = ["eager", "jit"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LENGTHS = [1, 2, 3, 4, 5, 37, 150]  # by rows up to 4, then by panels

inf, nan = math.inf, math.nan


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def some_rows_empty(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx % 3 != 1) & ((q_idx + h - kv_idx).abs() < 70)


def operands(q_len: int, kv_len: int, group: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    shapes = (2, 2 * group, q_len, 20), (2, 2, kv_len, 20), (2, 2, kv_len, 12)
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def check(
    tensors: tuple[Tensor, Tensor, Tensor],
    backend: Backend,
    *,
    mask: Callable[..., Any] | None = None,
    **options: Any,
) -> AuxOutput:
    """Compare both with the reference in float64. Of nearly equal scores, either may win."""
    query, key, value = tensors
    _, aux = attention(
        query, Dense(key, value), mask=mask, return_aux=BOTH, backend=backend, **options
    )
    assert aux.lse is None and aux.max_scores is None
    assert aux.argmax is not None and aux.entropy is not None
    start = options.pop("q_start", max(0, key.shape[2] - query.shape[2]))
    peer, exact = (
        reference.attention(*given, mask_mod=mask, q_start=start, **options)
        for given in (tensors, [tensor.double() for tensor in tensors])
    )
    assert_as_good_as(aux.entropy, peer.entropy, exact.entropy, "entropy", size=size_of(exact))
    assert bool((aux.entropy.nan_to_num(0.0) >= 0).all())
    assert_is_argmax(aux.argmax, exact, torch.finfo(aux.entropy.dtype).eps)
    return aux


def size_of(exact: Reference) -> float:
    """Return the size of the scores: an entropy is a difference of numbers of this size."""
    finite = exact.max_scores[exact.max_scores.isfinite()]
    return max(1.0, finite.abs().max().item()) if finite.numel() else 1.0


def assert_is_argmax(argmax: Tensor, exact: Reference, epsilon: float) -> None:
    assert argmax.dtype == torch.int64
    assert torch.equal(argmax == -1, exact.argmax == -1)
    here, best = (
        exact.probabilities.gather(-1, places.clamp(min=0).unsqueeze(-1))
        for places in (argmax, exact.argmax)
    )
    near = here >= best * (1 - 64 * epsilon * size_of(exact))
    assert bool((near.squeeze(-1) | (argmax == exact.argmax)).all())


# The same as the reference


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", LENGTHS)
def test_dtypes_and_lengths(q_len: int, dtype: torch.dtype, backend: Backend) -> None:
    check(operands(q_len, 263, dtype=dtype), backend)
    check(operands(q_len, 131, group=3, dtype=dtype), backend, mask=causal)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("q_len", LENGTHS)
def test_mods_and_sinks(q_len: int, backend: Backend) -> None:
    sink = torch.tensor([0.5, -inf, 30.0, 2.0])
    options: dict[str, Any] = {"mask": some_rows_empty, "sink": sink}
    check(operands(q_len, 263, group=2), backend, **options)
    softcap = mods.softcap(3.0)
    aux = check(operands(q_len, 263, group=2), backend, score_mod=softcap, q_start=0, **options)
    assert aux.argmax is not None and aux.entropy is not None
    empty = torch.arange(q_len) % 3 == 1
    assert bool((aux.argmax[..., empty] == -1).all())
    assert bool((aux.entropy[..., empty] == 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("q_len", [1, 40])
def test_scores_far_from_zero_and_from_each_other(q_len: int, backend: Backend) -> None:
    for scale in (0.0, 50.0, 3000.0):
        check(operands(q_len, 300), backend, scale=scale)
    low = lambda score, b, h, q_idx, kv_idx: score * 1e36  # noqa: E731
    check(operands(q_len, 300), backend, score_mod=low)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (3, 0), (30, 0), (0, 0)])
def test_no_queries_or_no_keys(q_len: int, kv_len: int, backend: Backend) -> None:
    query, key, value = operands(q_len, kv_len)
    _, aux = attention(query, Dense(key, value), return_aux=BOTH, backend=backend)
    assert torch.equal(aux.argmax, torch.full((2, 2, q_len), -1))
    assert torch.equal(aux.entropy, torch.zeros(2, 2, q_len))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("q_len", [1, 5])
def test_positions_are_absolute(q_len: int, backend: Backend) -> None:
    query, key, value = operands(q_len, 300)
    far = 2**33  # beyond what 32 bits hold
    for start in (0, 1000, far):
        memory = Dense(key, value, start)
        _, aux = attention(query, memory, return_aux=BOTH, backend=backend)
        expected = reference.attention(query, key, value, kv_start=start)
        assert torch.equal(aux.argmax, expected.argmax)
        assert int(expected.argmax.min()) >= start


# Ties, NaN and infinity


SPECIAL: dict[str, list[tuple[int, float]]] = {
    "ties": [(130, 5.0), (7, 5.0), (131, 5.0)],
    "ties in one vector": [(12, 5.0), (9, 5.0)],
    "all equal": [],
    "one nan": [(140, nan)],
    "first of nan": [(200, nan), (140, nan), (141, inf)],
    "nan before all": [(0, nan), (3, 9.0)],
    "inf": [(150, inf), (20, inf)],
    "mostly unread": [*((at, -inf) for at in range(300) if at != 177)],
    "unread": [*((at, -inf) for at in range(300))],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("q_len", [1, 4, 5, 20])
def test_special_scores(q_len: int, name: str, dtype: torch.dtype, backend: Backend) -> None:
    wide = torch.zeros(300, dtype=dtype)
    for at, number in SPECIAL[name]:
        wide[at] = number

    def special(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where(q_idx % 2 == 0, wide[kv_idx], score)

    tensors = operands(q_len, 300, dtype=dtype)
    _, aux = attention(
        tensors[0],
        Dense(*tensors[1:]),
        score_mod=special,
        q_start=0,
        return_aux=BOTH,
        backend=backend,
    )
    expected = reference.attention(*tensors, score_mod=special)
    assert torch.equal(aux.argmax, expected.argmax)
    torch.testing.assert_close(aux.entropy, expected.entropy, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("q_len", [1, 20])
def test_dropout_changes_neither(q_len: int, backend: Backend) -> None:
    query, key, value = operands(q_len, 300)
    found = [
        attention(query, Dense(key, value), dropout_p=p, return_aux=BOTH, backend=backend)[1]
        for p in (0.0, 0.6)
    ]
    assert torch.equal(found[0].argmax, found[1].argmax)
    assert torch.equal(found[0].entropy, found[1].entropy)


# The same bits


@pytest.mark.parametrize("q_len", [2, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_threads_and_block_sizes_do_not_matter(
    q_len: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "SMALL_WORK", 0)
    tensors = operands(q_len, 300, group=2, dtype=dtype)
    mask = mods.and_masks(
        lambda b, h, q_idx, kv_idx: q_idx + 60 >= kv_idx, mods.document(lengths=[70, 130, 100])
    )
    plain = {"mask_mod": mask}
    blocks = {
        size: {"block_mask": create_block_mask(mask, None, None, q_len, 300, BLOCK_SIZE=size)}
        for size in (64, 128)
    }
    found = []
    for threads, options in ((1, plain), (2, plain), (1, blocks[64]), (2, blocks[128])):
        torch.set_num_threads(threads)
        _, aux = quire.flex_attention(
            *tensors, **options, enable_gqa=True, return_aux=ALL, backend="jit"
        )
        found.append(aux)
    for other in found[1:]:
        for name in ("lse", "max_scores", "argmax", "entropy"):
            assert torch.equal(getattr(found[0], name), getattr(other, name)), name


@pytest.mark.parametrize("q_len", [3, 70])
def test_what_else_is_asked_for_does_not_matter(q_len: int) -> None:
    query, key, value = operands(q_len, 200)
    memory = Dense(key, value)
    plain = attention(query, memory, mask=causal, backend="jit")
    everything = AuxRequest(True, True, True, True, True, weights=[0, -1])
    out, every = attention(query, memory, mask=causal, return_aux=everything, backend="jit")
    assert torch.equal(plain, out)
    for name, asked in everything._asdict().items():
        request = AuxRequest(**{name: asked})
        _, alone = attention(query, memory, mask=causal, return_aux=request, backend="jit")
        assert torch.equal(getattr(alone, name), getattr(every, name))
        assert [field for field, value in alone._asdict().items() if value is not None] == [name]


# Gradients


@pytest.mark.parametrize("backend", BACKENDS)
def test_neither_has_a_gradient_and_others_keep_theirs(backend: Backend) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in operands(9, 20))
    out, aux = attention(query, Dense(key, value), return_aux=ALL, backend=backend)
    assert aux.argmax is not None and aux.entropy is not None and aux.lse is not None
    assert not aux.argmax.requires_grad and not aux.entropy.requires_grad
    expected = reference.attention(query, key, value)
    assert torch.equal(aux.argmax, expected.argmax)
    torch.testing.assert_close(aux.entropy, expected.entropy)
    (grad,) = torch.autograd.grad(out.square().sum() + aux.lse.sum(), query)
    (truth,) = torch.autograd.grad(expected.out.square().sum() + expected.lse.sum(), query)
    torch.testing.assert_close(grad, truth, rtol=1e-4, atol=1e-5)


# Asking


def test_a_request_of_torch_is_answered_in_its_class() -> None:
    query, key, value = operands(5, 9)
    request = torch_flex.AuxRequest(lse=True)
    assert checked_request(request) == AuxRequest(lse=True)
    for out, aux in (
        attention(query, Dense(key, value), return_aux=request),
        quire.flex_attention(query, key, value, return_aux=request),
    ):
        assert isinstance(aux, torch_flex.AuxOutput)
        lse, max_scores = aux
        assert max_scores is None
        assert lse is not None and lse.shape == out.shape[:-1]


def test_code_for_torch_runs_unchanged() -> None:
    with quire.patch_torch():
        out, (lse, max_scores) = torch_flex.flex_attention(
            *operands(5, 9), return_aux=torch_flex.AuxRequest(lse=True, max_scores=True)
        )
    assert lse is not None and max_scores is not None
    assert lse.shape == max_scores.shape == out.shape[:-1]


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(OptionError, match="return_aux must be an AuxRequest, but is a tuple"):
        checked_request((True, False))


# The code


@pytest.mark.parametrize("form", ["panel", "row"])
@pytest.mark.parametrize("processor", ["x86-64-v3", "x86-64-v4", "aarch64"])
@pytest.mark.parametrize("element", [F32, F64], ids=str)
def test_it_compiles_for_every_processor(form: Form, processor: str, element: Any) -> None:
    tile = TileShape(Target.named(processor), element)
    assert OBSERVE.name in jit.assembly(write_observe(form, tile).text, tile.target)


def test_nothing_is_compiled_for_those_who_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    observer = prepare.observer
    monkeypatch.setattr(prepare, "observer", lambda *args: asked.append(args) or observer(*args))
    query, key, value = operands(3, 20)
    memory = Dense(key, value)
    attention(query, memory, backend="jit")
    attention(query, memory, return_aux=AuxRequest(lse=True, max_scores=True), backend="jit")
    assert not asked
    attention(query, memory, return_aux=AuxRequest(argmax=True), backend="jit")
    assert len(asked) == 1


# Checking itself


def test_a_wrong_entropy_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CHECK", "1")
    config.cache_clear()
    query, key, value = operands(20, 30)
    memory = Dense(key, value)
    attention(query, memory, return_aux=BOTH, backend="jit")
    right = ForwardPlan.run

    def wrong(*args: Any) -> Any:
        result = right(*args)
        result.entropy.add_(0.01)
        return result

    monkeypatch.setattr(ForwardPlan, "run", wrong)
    with pytest.raises(KernelMismatchError, match="entropy of batches"):
        attention(query, memory, return_aux=BOTH, backend="jit")

"""flex_attention stands in for PyTorch's: its parameters, its rules, its numbers."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from compare import assert_as_good_as
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import quire
from quire import AuxOutput, AuxRequest, BlockMask, KernelOptionWarning, create_block_mask
from quire.api.kernel_options import FlexKernelOptions, KernelBackend
from quire.errors import HeadsError, OptionError

flex_attention: Callable[..., Any] = functools.partial(quire.flex_attention, backend="eager")


@pytest.fixture(autouse=True)
def _torch_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def tensors(
    q_len: int = 20, kv_len: int = 20, heads: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(2, heads, q_len, 8, dtype=dtype)
    key, value = torch.randn(2, 2, 2, kv_len, 8, dtype=dtype)
    return query, key, value


def one_block(mask_mod: Callable[..., Any], q_len: int, kv_len: int) -> torch_flex.BlockMask:
    """A mask of PyTorch's that leaves everything to its mask_mod."""
    return torch_flex.BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32),
        torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        BLOCK_SIZE=max(q_len, kv_len),
        mask_mod=mask_mod,
        seq_lengths=(q_len, kv_len),
    )


# Signatures


@pytest.mark.parametrize("name", ["flex_attention", "create_block_mask", "create_mask"])
def test_the_parameters_of_torch_are_a_prefix_of_ours(name: str) -> None:
    theirs = list(inspect.signature(getattr(torch_flex, name)).parameters.values())
    ours = list(inspect.signature(getattr(quire, name)).parameters.values())
    for mine, original in zip(ours, theirs, strict=False):
        assert (mine.name, mine.kind) == (original.name, original.kind)
        assert mine.default == original.default, mine.name
    assert len(ours) >= len(theirs)
    assert all(extra.kind is extra.KEYWORD_ONLY for extra in ours[len(theirs) :])


def test_what_comes_after_the_parameters_of_torch() -> None:
    count = len(inspect.signature(torch_flex.flex_attention).parameters)
    ours = list(inspect.signature(quire.flex_attention).parameters)
    added = ["mask_mod", "dropout_p", "generator", "sink", "weight", "normalise", "prob_mod"]
    assert ours[count:] == [*added, "backend"]


@pytest.mark.parametrize("name", ["AuxRequest", "AuxOutput"])
def test_aux_types_begin_with_those_of_torch(name: str) -> None:
    ours, theirs = getattr(quire, name), getattr(torch_flex, name)
    assert ours._fields == (*theirs._fields, "argmax", "entropy", "key_mass", "weights")
    assert ours._field_defaults.items() >= theirs._field_defaults.items()


def test_all_kernel_options_of_torch_are_known() -> None:
    assert (
        FlexKernelOptions.__annotations__.keys()
        == torch_flex.FlexKernelOptions.__annotations__.keys()
    )
    assert get_args(KernelBackend) == get_args(torch_flex._Backend)


# Numbers


SCORE_MODS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "relative": lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx),
    "alibi": quire.mods.alibi(4),
    "softcap": lambda score, b, h, q_idx, kv_idx: 20 * torch.tanh(score / 20),
    "table": lambda score, b, h, q_idx, kv_idx: score + BIAS[b, h, q_idx - kv_idx],
    "causal": lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -math.inf),
}
MASK_MODS: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "causal": causal,
    "window": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= 3,
    "document": lambda b, h, q_idx, kv_idx: DOCUMENT[b, q_idx] == DOCUMENT[b, kv_idx],
    "empty rows": lambda b, h, q_idx, kv_idx: (q_idx % 3 != 1) & (h > 0),
}
BIAS = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
DOCUMENT = torch.stack([torch.arange(32) // 5, torch.arange(32) // 9])


@pytest.mark.parametrize("score", SCORE_MODS)
@pytest.mark.parametrize("mask", MASK_MODS)
@pytest.mark.parametrize("heads", [2, 4], ids=["equal heads", "groups"])
def test_numbers_are_those_of_torch(score: str, mask: str, heads: int) -> None:
    q_len, kv_len = 21, 29
    query, key, value = tensors(q_len, kv_len, heads)
    mask_mod = MASK_MODS[mask]
    options: dict[str, Any] = {
        "score_mod": SCORE_MODS[score],
        "block_mask": None if mask_mod is None else one_block(mask_mod, q_len, kv_len),
        "enable_gqa": heads == 4,
        "return_aux": AuxRequest(lse=True),
    }
    expected, expected_aux = torch_flex.flex_attention(query, key, value, **options)
    out, aux = flex_attention(query, key, value, **options)
    assert isinstance(aux, AuxOutput)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(aux.lse, expected_aux.lse)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_autocast", [False, True])
def test_dtypes_are_those_of_torch(dtype: torch.dtype, by_autocast: bool) -> None:
    """And the error is no larger than that of PyTorch."""
    operands = [tensor.to(dtype) for tensor in tensors(64, 64)]
    wide = [tensor.double() for tensor in operands]
    if by_autocast and dtype != torch.float64:
        operands = [tensor.float() for tensor in operands]
    options: dict[str, Any] = {"scale": 0.3, "return_aux": AuxRequest(lse=True)}
    with torch.autocast("cpu", dtype=dtype, enabled=by_autocast and dtype != torch.float64):
        expected, expected_aux = torch_flex.flex_attention(*operands, **options)
        out, aux = flex_attention(*operands, **options)
    truth, truth_aux = torch_flex.flex_attention(*wide, **options)
    assert out.dtype == dtype
    assert_as_good_as(out, expected, truth)
    assert_as_good_as(aux.lse, expected_aux.lse, truth_aux.lse, "lse")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
def test_mixed_dtypes_of_keys_and_values(dtype: torch.dtype) -> None:
    query, key, value = tensors()
    key, value = key.to(dtype), value.to(torch.bfloat16)
    expected = torch_flex.flex_attention(query, key, value)
    out = flex_attention(query, key, value)
    assert out.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(out, expected)


LAYOUTS: dict[str, Callable[[int, int, int, int], Tensor]] = {
    "contiguous": lambda b, h, n, d: torch.randn(b, h, n, d),
    "heads inside": lambda b, h, n, d: torch.randn(b, n, h, d).transpose(1, 2),
    "length outside": lambda b, h, n, d: torch.randn(n, b, h, d).permute(1, 2, 0, 3),
    "head dim outside": lambda b, h, n, d: torch.randn(b, d, h, n).permute(0, 2, 3, 1),
    "with gaps": lambda b, h, n, d: torch.randn(b, h, n, 2 * d)[..., ::2],
    "expanded": lambda b, h, n, d: torch.randn(1, h, 1, d).expand(b, h, n, d),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(2, 3, 5, 4), (1, 3, 5, 4), (2, 1, 5, 4), (2, 3, 1, 4), (2, 3, 5, 1)]
)
@pytest.mark.parametrize("value_dim", [4, 6])
def test_strides_are_those_of_torch(
    layout: str, shape: tuple[int, int, int, int], value_dim: int
) -> None:
    query = LAYOUTS[layout](*shape)
    key = torch.randn(*shape[:2], 7, shape[3])
    value = torch.randn(*shape[:2], 7, value_dim)
    expected = torch_flex.flex_attention(query, key, value)
    assert flex_attention(query, key, value).stride() == expected.stride()


def test_a_query_that_requires_grad_keeps_its_strides_too() -> None:
    query = torch.randn(2, 5, 3, 4, dtype=torch.bfloat16, requires_grad=True).transpose(1, 2)
    out = flex_attention(query, query, query)
    assert out.stride() == query.stride()


# Return values


def test_return_lse_is_deprecated_and_works() -> None:
    query, key, value = tensors()
    with pytest.warns(FutureWarning, match="return_lse is deprecated") as caught:
        out, lse = flex_attention(query, key, value, return_lse=True)
    assert caught[0].filename == __file__
    expected, aux = flex_attention(query, key, value, return_aux=AuxRequest(lse=True))
    assert torch.equal(out, expected)
    assert torch.equal(lse, aux.lse)


def test_return_lse_and_return_aux_exclude_each_other() -> None:
    query, key, value = tensors()
    with pytest.raises(
        OptionError, match="only one of return_lse and return_aux must be given"
    ) as caught:
        flex_attention(query, key, value, return_lse=True, return_aux=AuxRequest())
    assert isinstance(caught.value, ValueError)


def test_aux_outputs() -> None:
    query, key, value = (tensor.requires_grad_() for tensor in tensors())
    request = torch_flex.AuxRequest(lse=True, max_scores=True)
    _, aux = flex_attention(query, key, value, return_aux=request)
    assert aux.lse.dtype == aux.max_scores.dtype == torch.float32
    assert aux.lse.requires_grad
    assert not aux.max_scores.requires_grad
    scores = query @ key.transpose(-2, -1) / math.sqrt(8)
    torch.testing.assert_close(aux.lse, scores.logsumexp(-1))
    torch.testing.assert_close(aux.max_scores, scores.amax(-1))


# Kernel options


@pytest.mark.parametrize("prefix", ["", "fwd_", "bwd_"])
def test_kernel_options_change_nothing(prefix: str) -> None:
    query, key, value = tensors()
    named = {name: 1 for name in FlexKernelOptions.__annotations__ if name != "BACKEND"}
    options = {f"{prefix}{name}": value for name, value in named.items()}
    assert torch.equal(
        flex_attention(query, key, value, kernel_options=options), flex_attention(query, key, value)
    )
    for backend in get_args(KernelBackend):
        flex_attention(query, key, value, kernel_options={"BACKEND": backend, "BLOCK_M": 64})


def test_an_unknown_kernel_option_warns_with_a_suggestion() -> None:
    query, key, value = tensors()
    with pytest.warns(
        KernelOptionWarning, match="'BLOK_M', which is ignored. Did you mean 'BLOCK_M'"
    ) as caught:
        flex_attention(query, key, value, kernel_options={"BLOK_M": 64})
    assert caught[0].filename == __file__
    with pytest.warns(
        KernelOptionWarning, match="'colour', which is ignored. See FlexKernelOptions"
    ):
        flex_attention(query, key, value, kernel_options={"colour": "blue"})
    with pytest.warns(KernelOptionWarning, match="'fwd_bwd_BLOCK_M'"):
        flex_attention(query, key, value, kernel_options={"fwd_bwd_BLOCK_M": 64})


@pytest.mark.parametrize(
    "options",
    [
        {"BACKEND": "FLESH"},
        {"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True},
        {"OUTPUT_LOGSUMEXP": True},
        {"OUTPUT_MAX": True},
    ],
    ids=str,
)
def test_what_torch_refuses_is_refused_with_its_type(options: dict[str, Any]) -> None:
    query, key, value = tensors()
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        torch_flex.flex_attention(query, key, value, kernel_options=options)
    with pytest.raises(OptionError) as ours:
        flex_attention(query, key, value, kernel_options=options)
    assert isinstance(ours.value, theirs.type)


# Right here, where PyTorch 2.13 is not


def test_the_lists_of_a_hand_made_block_mask_are_honoured() -> None:
    query, key, value = tensors(8, 8)
    mask = BlockMask.from_kv_blocks(
        torch.tensor([[[1, 2]]]), torch.tensor([[[[1, 0], [0, 1]]]]), BLOCK_SIZE=4
    )
    allowed = torch.tensor([[0, 1], [1, 1]]).repeat_interleave(4, 0).repeat_interleave(4, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed > 0)
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=mask), expected)


@pytest.mark.parametrize(("axis", "size"), [("B", 3), ("H", 4)])
def test_a_block_mask_for_other_batches_or_heads_is_refused(axis: str, size: int) -> None:
    query, key, value = tensors(16, 16)
    sizes = {"B": None, "H": None, axis: size}
    mask = create_block_mask(causal, **sizes, Q_LEN=16, KV_LEN=16)
    message = rf"must have {axis}=2, as the query, or {axis}=1, but has {axis}={size}.*B=2, H=2"
    with pytest.raises(ValueError, match=message):
        flex_attention(query, key, value, block_mask=mask)


def test_a_captured_scalar_has_a_gradient() -> None:
    query, key, value = tensors()
    factor = torch.nn.Parameter(torch.tensor(1.5))
    out = flex_attention(query, key, value, lambda score, *_: score * factor)
    out.square().sum().backward()
    twin = torch.nn.Parameter(torch.tensor(1.5))
    scores = query @ key.transpose(-2, -1) / math.sqrt(8) * twin
    (scores.softmax(-1) @ value).square().sum().backward()
    torch.testing.assert_close(factor.grad, twin.grad)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0)])
def test_an_empty_query_or_key_gives_zeros(q_len: int, kv_len: int) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in tensors(q_len, kv_len))
    block_mask = create_block_mask(causal, None, None, q_len, kv_len)
    for options in ({}, {"block_mask": block_mask}, {"mask_mod": causal}):
        out = flex_attention(query, key, value, **options)
        assert out.shape == (2, 2, q_len, 8)
        assert not out.any()
        for grad in torch.autograd.grad(out.sum(), (query, key, value)):
            assert not grad.any()


def test_a_mask_mod_may_return_a_python_bool() -> None:
    query, key, value = tensors()
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: True, None, None, 20, 20)
    expected = flex_attention(query, key, value)
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=mask), expected)
    same = flex_attention(query, key, value, mask_mod=lambda b, h, q_idx, kv_idx: True)
    torch.testing.assert_close(same, expected)


def test_bound_methods_are_mods() -> None:
    class Mods:
        width = 4

        def mask(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (q_idx - kv_idx).abs() < self.width

        def score(
            self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
        ) -> Tensor:
            return score * self.width

    mods, (query, key, value) = Mods(), tensors()
    block_mask = create_block_mask(mods.mask, None, None, 20, 20)
    near = torch.ones(20, 20).tril(3).triu(-3) > 0
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, near, scale=4 / math.sqrt(8)
    )
    out = flex_attention(query, key, value, mods.score, block_mask)
    torch.testing.assert_close(out, expected)


def test_backward_and_log_sum_exp_work_on_a_cpu() -> None:
    query, key, value = (tensor.requires_grad_() for tensor in tensors())
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        torch_flex.flex_attention(query, key, value)
    out, aux = flex_attention(query, key, value, return_aux=AuxRequest(lse=True))
    (out.sum() + aux.lse.sum()).backward()
    assert all(tensor.grad is not None for tensor in (query, key, value))


def test_heads_in_groups_need_enable_gqa() -> None:
    query, key, value = tensors(heads=4)
    with pytest.raises(HeadsError, match="Set enable_gqa=True") as caught:
        flex_attention(query, key, value)
    assert isinstance(caught.value, ValueError)
    assert flex_attention(query, key, value, enable_gqa=True).shape == query.shape


def test_one_batch_of_keys_serves_all() -> None:
    query, key, value = tensors()
    mask = create_block_mask(causal, 2, None, 20, 20)
    options = {"block_mask": mask}
    expected = torch_flex.flex_attention(query, key[:1], value[:1], **options)
    torch.testing.assert_close(flex_attention(query, key[:1], value[:1], **options), expected)


def test_nothing_warns() -> None:
    """PyTorch's own warns that it was not compiled."""
    query, key, value = tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flex_attention(query, key, value, quire.mods.alibi(2), mask_mod=causal)

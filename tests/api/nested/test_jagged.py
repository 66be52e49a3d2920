"""jagged_scaled_dot_product_attention: what PyTorch's does, and what it does not."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from api.nested.jagged import assert_same, nested, one_by_one, with_a_head, with_holes
from torch import Tensor
from torch.nested._internal import sdpa as torch_sdpa
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torch_version import NO_BACKEND

import quire
from quire import jagged_scaled_dot_product_attention as attend
from quire.api.nested import attention as module
from quire.errors import BackendError, DeviceError

LENGTHS = [3, 40, 1, 17]
OTHERS = [9, 2, 33, 17]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def test_the_parameters_are_pytorchs() -> None:
    theirs = inspect.signature(torch_sdpa.jagged_scaled_dot_product_attention).parameters
    ours = inspect.signature(attend).parameters
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_it_computes_what_pytorch_computes() -> None:
    query, key, value = (nested(LENGTHS, seed=seed) for seed in range(3))
    theirs = F.scaled_dot_product_attention(query, key, value)
    ours = attend(query, key, value)
    torch.testing.assert_close(ours.values(), theirs.values())
    assert ours.shape == theirs.shape == query.shape  # the ragged dimension is the query's own
    assert ours.values().stride() == theirs.values().stride()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dims", [(8, 8), (13, 5)])
def test_queries_and_keys_of_other_lengths(is_causal: bool, dims: tuple[int, int]) -> None:
    query = nested(LENGTHS, dim=dims[0])
    key, value = nested(OTHERS, dim=dims[0], seed=1), nested(OTHERS, dim=dims[1], seed=2)
    found = attend(query, key, value, is_causal=is_causal, scale=0.7)
    mods = {"mask_mod": causal} if is_causal else {}
    assert_same(found, one_by_one(query, key, value, lambda b: mods, scale=0.7))


def test_one_head_needs_no_dimension() -> None:
    query, key, value = (nested(LENGTHS, heads=None, seed=seed) for seed in range(3))
    found = attend(query, key, value, is_causal=True)
    assert found.shape == query.shape
    assert found._ragged_idx == 1
    wide = map(with_a_head, (query, key, value))
    expected = one_by_one(*wide, lambda b: {"mask_mod": causal})
    assert_same(found, [part[0] for part in expected])


def test_holes_and_empty_sequences() -> None:
    lengths = [3, 0, 5, 1, 0]
    query, key = with_holes(lengths, seed=0), with_holes(lengths, seed=1)
    value = nested(lengths, seed=2)  # the same sequences, without holes
    found = attend(query, key, value, is_causal=True)
    assert found.lengths() is query.lengths() and found.offsets() is query.offsets()
    assert_same(found, one_by_one(query, key, value, lambda b: {"mask_mod": causal}))
    assert bool(found.values().isfinite().all())


def test_what_is_known_of_the_lengths_is_kept() -> None:
    query = nested(LENGTHS)
    found: Any = attend(query, query, query)
    assert (found._maybe_min_seqlen, found._maybe_max_seqlen) == (1, 40)
    values, offsets = torch.randn(7, 2, 8), torch.tensor([0, 3, 7])
    bare = torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)
    found = attend(bare, bare, bare)
    assert found._maybe_max_seqlen is None


def test_a_result_is_the_same_whether_it_is_learned_or_not() -> None:
    query: Any = nested(LENGTHS)
    learned: Any = attend(query.detach().requires_grad_(), query, query)
    plain: Any = attend(query, query, query)
    assert learned.requires_grad and not plain.requires_grad
    assert torch.equal(plain.values(), learned.values())
    assert (plain._size, plain._strides) == (learned._size, learned._strides)
    assert plain.offsets() is query.offsets() and plain.lengths() is learned.lengths()
    for name in ("_maybe_min_seqlen", "_maybe_max_seqlen"):
        assert getattr(plain, name) == getattr(learned, name)


# Heads and batches


def test_groups_of_heads() -> None:
    query = nested(LENGTHS, heads=6)
    key, value = nested(LENGTHS, heads=2, seed=1), nested(LENGTHS, heads=2, seed=2)
    assert_same(attend(query, key, value, enable_gqa=True), one_by_one(query, key, value))


def test_one_head_serves_all() -> None:
    query = nested(LENGTHS, heads=4)
    key, value = nested(LENGTHS, heads=1, seed=1), nested(LENGTHS, heads=4, seed=2)
    repeated = nested(LENGTHS, heads=1, seed=1)
    wide = [part.expand(4, -1, -1) for part in repeated.unbind()]
    found = attend(query, key, value)
    expected = [
        F.scaled_dot_product_attention(q, k, v)
        for q, k, v in zip(query.unbind(), wide, value.unbind(), strict=True)
    ]
    assert_same(found, expected)
    assert attend(key, query, value).size(1) == 4


def test_one_sequence_serves_all() -> None:
    query = nested(LENGTHS)
    key, value = nested([12], seed=1), nested([12], seed=2)
    found = attend(query, key, value)
    expected = [
        F.scaled_dot_product_attention(q, key.unbind()[0], value.unbind()[0])
        for q in query.unbind()
    ]
    assert_same(found, expected)
    turned = attend(key, query, query)
    assert turned.size(0) == len(LENGTHS)
    expected = [F.scaled_dot_product_attention(key.unbind()[0], q, q) for q in query.unbind()]
    assert_same(turned, expected)


def test_a_ragged_dimension_that_is_not_the_sequence() -> None:
    boxes = [torch.randn(n, 3, 16, 8) for n in (2, 5)]
    query = torch.nested.nested_tensor(boxes, layout=torch.jagged)  # [B, j, H, L, D]
    found = attend(query, query, query, is_causal=True)
    expected = [F.scaled_dot_product_attention(x, x, x, is_causal=True) for x in boxes]
    assert_same(found, expected)
    assert found.shape == query.shape


# Numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    query = nested(LENGTHS).to(dtype)
    found = attend(query, query, query)
    assert found.dtype == dtype
    expected = one_by_one(*[nested(LENGTHS).double()] * 3)
    for part, wanted in zip(found.unbind(), expected, strict=True):
        torch.testing.assert_close(part.double(), wanted, atol=2e-2, rtol=2e-2)


def test_autocast_comes_before_the_checks() -> None:
    query, key = nested(LENGTHS), nested(LENGTHS, seed=1).bfloat16()
    bias = torch.zeros(40, 40)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(query, key, key, bias).dtype == torch.bfloat16
        double = query.double()
        assert attend(double, double, double).dtype == torch.float64


def test_gradients() -> None:
    leaves = [nested(LENGTHS, seed=seed).detach().requires_grad_() for seed in range(3)]
    attend(*leaves, is_causal=True).values().square().sum().backward()
    copies = [leaf.detach().requires_grad_() for leaf in leaves]
    parts = one_by_one(*copies, lambda b: {"mask_mod": causal})
    torch.cat([part.square().flatten() for part in parts]).sum().backward()
    for leaf, copy in zip(leaves, copies, strict=True):
        assert leaf.grad is not None and copy.grad is not None
        torch.testing.assert_close(leaf.grad.values(), copy.grad.values())


def test_dropout_draws_from_the_default_generator() -> None:
    query = nested(LENGTHS)
    torch.manual_seed(1)
    first = attend(query, query, query, dropout_p=0.5).values()
    assert not torch.equal(first, attend(query, query, query, dropout_p=0.5).values())
    torch.manual_seed(1)
    assert torch.equal(first, attend(query, query, query, dropout_p=0.5).values())


# Who computes


@pytest.mark.parametrize(
    ("allowed", "backend"),
    [
        (SDPBackend.MATH, "eager"),
        (SDPBackend.FLASH_ATTENTION, "jit"),
        (SDPBackend.EFFICIENT_ATTENTION, "jit"),
        ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], "auto"),
    ],
    ids=str,
)
def test_sdpa_kernel_says_who_computes(
    allowed: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def attention(*args: Any, **options: Any) -> Tensor:
        asked.append(options["backend"])
        out: Tensor = quire.attention(*args, **options)
        return out

    monkeypatch.setattr(module, "attention", attention)
    query = nested(LENGTHS)
    with sdpa_kernel(allowed):
        found = attend(query, query, query)
    assert asked == [backend]
    torch.testing.assert_close(found.values(), attend(query, query, query).values())


def test_nobody_may_compute() -> None:
    query = nested(LENGTHS)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(BackendError) as caught:
        attend(query, query, query)
    off = "switched off by torch.nn.attention.sdpa_kernel or torch.backends.cuda"
    assert str(caught.value) == (
        f"No viable backend for scaled_dot_product_attention was found:\n"
        f"  flash_attention and efficient_attention: {off}.\n"
        f"  math: {off}.\n"
        f"  cudnn_attention: runs on CUDA only.\n"
        f"Allow one of them with sdpa_kernel, or change what the lines name."
    )
    assert isinstance(caught.value, RuntimeError)  # as PyTorch's is


def test_whoever_may_compute_cannot() -> None:
    query = nested([3, 4], heads=1, dim=1032)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(BackendError) as caught:
        attend(query, query, query)
    assert str(caught.value).splitlines()[:2] == [
        "No viable backend for scaled_dot_product_attention was found:",
        "  flash_attention and efficient_attention: jit: its head dim is 1032, and kernels go up "
        "to 1024.",
    ]
    assert attend(query, query, query).shape == query.shape


# Counting, compiling, patching


@pytest.mark.parametrize("dim", [8, 13])
def test_meta_tensors_are_counted(dim: int) -> None:
    query = nested([3, 5], dim=dim)
    with FlopCounterMode(display=False) as counter:
        found = attend(*[query.to("meta")] * 3)
    assert counter.get_total_flops() == 4 * 2 * 2 * 5 * 5 * dim  # as padded to the longest
    assert found.is_meta and found.size(-1) == dim
    one_head = nested([3, 5], heads=None).to("meta")
    assert attend(one_head, one_head, one_head).dim() == 3


def test_meta_tensors_must_know_their_longest_sequence() -> None:
    values, offsets = torch.randn(7, 2, 8, device="meta"), torch.tensor([0, 3, 7], device="meta")
    query = torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)
    with pytest.raises(DeviceError) as caught:
        attend(query, query, query)
    assert str(caught.value) == (
        "nested tensors on the meta device must know their longest sequence, but one does not, "
        "and it cannot be read there. Give max_seqlen to torch.nested.nested_tensor_from_jagged."
    )


def test_patched_pytorch_takes_causal_masks() -> None:
    query = nested(LENGTHS)
    expected = attend(query, query, query, is_causal=True).values()
    with quire.patch_torch():
        found = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert torch.equal(found.values(), expected)
    with pytest.raises(RuntimeError, match=NO_BACKEND):
        F.scaled_dot_product_attention(query, query, query, is_causal=True)


@pytest.mark.parametrize("patched", [False, True])
def test_inside_a_compiled_module(patched: bool) -> None:
    class Block(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            attention = F.scaled_dot_product_attention if patched else attend
            return attention(x * 2, x, x, is_causal=True) + 1

    query = nested(LENGTHS)
    expected = (attend(query * 2, query, query, is_causal=True) + 1).values()
    with quire.patch_torch():
        found = torch.compile(Block(), backend="aot_eager")(query)
        again = torch.compile(Block(), backend="aot_eager")(nested(OTHERS))
    assert torch.equal(found.values(), expected)
    assert again.size(0) == len(OTHERS)

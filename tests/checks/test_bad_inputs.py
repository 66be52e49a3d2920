"""Every mistake is refused by name: its class, the built-in type PyTorch raises, its message.

A message says what was expected, what came and what to do. A refused call changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex
from torch.testing._internal.two_tensor import TwoTensor
from torch_version import MASKS_MENDED

import quire
from quire import AuxRequest, BlockMask, Dense, and_masks, create_block_mask, create_mask
from quire.errors import (
    ArgumentError,
    BackendError,
    BlockIndexError,
    BlockMaskError,
    BlockMaskShapeError,
    CapturedIndexError,
    DeviceError,
    DivisionByZeroError,
    DtypeError,
    HeadsError,
    MaskPickleError,
    ModResultError,
    ModSignatureError,
    NotCallableError,
    OptionError,
    QuireError,
    RankError,
    ShapeError,
    SlicedMaskError,
    TensorKindError,
    TracedBranchError,
)

B, HQ, L, S, D = 2, 4, 5, 6, 8


@pytest.fixture(autouse=True)
def _torch_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def tensor(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, **options)


def operands() -> dict[str, Any]:
    return {"query": tensor(B, HQ, L, D), "key": tensor(B, HQ, S, D), "value": tensor(B, HQ, S, D)}


def adds(table: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, q_idx, kv_idx: score + table[q_idx]


@dataclass(frozen=True)
class Bad:
    """One mistake.

    `change` gives the arguments of flex_attention that differ from a call that is right; or `call`
    makes another mistake. `torch_raises` is what PyTorch's own raises for the same arguments, on
    purpose, if it does.
    """

    error: type[QuireError]
    message: str
    change: Callable[[], dict[str, Any]] | None = None
    call: Callable[[], object] | None = None
    torch_raises: type[Exception] | None = None

    def run(self) -> object:
        if self.call is not None:
            return self.call()
        assert self.change is not None
        return quire.flex_attention(**{"backend": "eager", **operands(), **self.change()})


# Mods at fault. Their lines are part of the messages.

BIAS = torch.zeros(3)


def branch(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score if q_idx >= kv_idx else score * 2


def conjunction(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> bool:
    return bool(q_idx > kv_idx and kv_idx > 1)


def chain(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> bool:
    return bool(0 <= q_idx - kv_idx < 3)


def number(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score * float(q_idx)


def python_list(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score * [1, 2, 3, 4][h]


def opaque_branch(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    strange = torch.lgamma(score)
    return strange if strange > 0 else score


def beyond(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + BIAS[kv_idx]


def beyond_below(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return BIAS[-kv_idx] >= 0


def opaque_beyond(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.lgamma(score) + BIAS[kv_idx]


def float_index(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + BIAS[score]


def many_indices(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + BIAS[q_idx, kv_idx]


def by_zero(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + q_idx // kv_idx


def whole_tensor(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + BIAS


def nothing(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> None:
    score + 1


def two(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> object:
    return score, score


def difference(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx - kv_idx


def opaque_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.lgamma(q_idx + 1.0)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def mask(*sizes: Any, **options: Any) -> BlockMask:
    return create_block_mask(causal, *sizes, **options)


def attend(memory: Any = None, **options: Any) -> object:
    query, key, value = operands().values()
    return quire.attention(query, Dense(key, value) if memory is None else memory, **options)


def lists(counts: Any, indices: Any, **options: Any) -> BlockMask:
    return BlockMask.from_kv_blocks(torch.tensor(counts), torch.tensor(indices), **options)


def fake() -> Tensor:
    with FakeTensorMode():
        return tensor(B, HQ, L, D)


def kv(*shape: int, **options: Any) -> dict[str, Tensor]:
    return {"key": tensor(*shape, **options), "value": tensor(*shape, **options)}


FLOATS = "float32, bfloat16, float16, float64"

OPERANDS = {
    "a list": Bad(
        ArgumentError,
        "query must be a torch.Tensor, but is list. Convert it with torch.as_tensor.",
        lambda: {"query": [1.0]},
    ),
    "an array": Bad(
        ArgumentError,
        "key must be a torch.Tensor, but is ndarray. Convert it with torch.as_tensor.",
        lambda: {"key": np.ones((B, HQ, S, D))},
    ),
    "None": Bad(
        ArgumentError,
        "value must be a torch.Tensor, but is NoneType. Convert it with torch.as_tensor.",
        lambda: {"value": None},
    ),
    "3 dimensions": Bad(
        RankError,
        "query must have 4 dimensions [batch, heads, length, head_dim], but has shape [4, 5, 8]. "
        "Add the missing ones with .unsqueeze.",
        lambda: {"query": tensor(HQ, L, D)},
        torch_raises=NotImplementedError,
    ),
    "5 dimensions": Bad(
        RankError,
        "key must have 4 dimensions [batch, heads, length, head_dim], but has shape "
        "[1, 2, 4, 6, 8].",
        lambda: {"key": tensor(1, B, HQ, S, D)},
        torch_raises=NotImplementedError,
    ),
    "1 dimension": Bad(
        RankError,
        "value must have 4 dimensions [batch, heads, length, head_dim], but has shape [6].",
        lambda: {"value": tensor(S)},
        torch_raises=ValueError,
    ),
    "head dims": Bad(
        ShapeError,
        "query and key must have the same embedding dimension, but have 8 and 3. Project one of "
        "them.",
        lambda: {"key": tensor(B, HQ, S, 3)},
        torch_raises=ValueError,
    ),
    "no head dim": Bad(
        ShapeError,
        "the embedding dimension of query and key must be at least 1, but is 0: they have shapes "
        "[2, 4, 5, 0] and [2, 4, 6, 0].",
        lambda: {"query": tensor(B, HQ, L, 0), "key": tensor(B, HQ, S, 0)},
    ),
    "no head dim, no backend named": Bad(
        ShapeError,
        "the embedding dimension of query and key must be at least 1, but is 0: they have shapes "
        "[2, 4, 5, 0] and [2, 4, 6, 0].",
        call=lambda: quire.attention(
            tensor(B, HQ, L, 0), Dense(tensor(B, HQ, S, 0), tensor(B, HQ, S, D))
        ),
    ),
    "lengths of key and value": Bad(
        ShapeError,
        "key and value must agree in batch, heads and length, but have shapes [2, 4, 6, 8] and "
        "[2, 4, 7, 8]. Only their last dimension may differ.",
        lambda: {"value": tensor(B, HQ, S + 1, D)},
        torch_raises=RuntimeError,
    ),
    "heads of key and value": Bad(
        ShapeError,
        "key and value must agree in batch, heads and length, but have shapes [2, 4, 6, 8] and "
        "[2, 2, 6, 8].",
        lambda: {"value": tensor(B, 2, S, D)},
        torch_raises=RuntimeError,
    ),
    "batches of key and value": Bad(
        ShapeError,
        "key and value must agree in batch, heads and length, but have shapes [2, 4, 6, 8] and "
        "[1, 4, 6, 8].",
        lambda: {"value": tensor(1, HQ, S, D)},
    ),
    "batches": Bad(
        ShapeError,
        "query and key must have the same batch size, but have Bq=3 and Bkv=2. Repeat the keys, "
        "or give keys with a batch size of 1.",
        lambda: {"query": tensor(3, HQ, L, D)},
        torch_raises=ValueError,
    ),
    "one batch of queries": Bad(
        ShapeError,
        "query and key must have the same batch size, but have Bq=1 and Bkv=2.",
        lambda: {"query": tensor(1, HQ, L, D)},
        torch_raises=ValueError,
    ),
    "groups without enable_gqa": Bad(
        HeadsError,
        "query and key must have the same number of heads, but Hq=4 and Hkv=2. Set "
        "enable_gqa=True for grouped-query attention.",
        lambda: kv(B, 2, S, D),
        torch_raises=ValueError,
    ),
    "heads that form no groups": Bad(
        HeadsError,
        "the number of query heads must be a multiple of the number of key heads, but Hq=4 and "
        "Hkv=3. Give a key head for each group of query heads.",
        lambda: {**kv(B, 3, S, D), "enable_gqa": True},
        torch_raises=ValueError,
    ),
    "no key heads": Bad(
        HeadsError,
        "the number of query heads must be a multiple of the number of key heads, but Hq=4 and "
        "Hkv=0.",
        lambda: {**kv(B, 0, S, D), "enable_gqa": True},
    ),
    "integers": Bad(
        DtypeError,
        f"query must be one of {FLOATS}, but is int64. Convert it with .to(dtype).",
        lambda: {"query": tensor(B, HQ, L, D, dtype=torch.int64)},
    ),
    "complex numbers": Bad(
        DtypeError,
        f"key must be one of {FLOATS}, float8_e4m3fn, float8_e5m2, but is complex64.",
        lambda: {"key": tensor(B, HQ, S, D, dtype=torch.complex64)},
    ),
    "truth values": Bad(
        DtypeError,
        f"value must be one of {FLOATS}, float8_e4m3fn, float8_e5m2, but is bool.",
        lambda: {"value": tensor(B, HQ, S, D, dtype=torch.bool)},
    ),
    "float8 queries": Bad(
        DtypeError,
        f"query must be one of {FLOATS}, but is float8_e4m3fn.",
        lambda: {"query": tensor(B, HQ, L, D).to(torch.float8_e4m3fn)},
    ),
    "the meta device": Bad(
        DeviceError,
        "query, key and value must hold data, but are on the meta device. Create them on 'cpu'",
        lambda: {name: x.to("meta") for name, x in operands().items()},
        torch_raises=ValueError,
    ),
    "two devices": Bad(
        DeviceError,
        "query, key and value must be on one device, but are on cpu, meta and cpu. Move them with "
        ".to(device).",
        lambda: {"key": tensor(B, HQ, S, D, device="meta")},
        torch_raises=ValueError,
    ),
    "a nested tensor": Bad(
        TensorKindError,
        "query must be a dense tensor, but is a NestedTensor. Pad it with "
        "torch.nested.to_padded_tensor.",
        lambda: {"query": torch.nested.nested_tensor([tensor(HQ, 3, D), tensor(HQ, L, D)])},
        torch_raises=NotImplementedError,
    ),
    "a jagged tensor": Bad(
        TensorKindError,
        "value must be a dense tensor, but is a NestedTensor.",
        lambda: {
            "value": torch.nested.nested_tensor(
                [tensor(3, HQ, D), tensor(L, HQ, D)], layout=torch.jagged
            ).transpose(1, 2)
        },
        torch_raises=NotImplementedError,
    ),
    "a sparse tensor": Bad(
        TensorKindError,
        "key must be a strided tensor, but has layout torch.sparse_coo. Convert it with "
        ".to_dense().",
        lambda: {"key": tensor(B, HQ, S, D).to_sparse()},
    ),
    "a fake tensor": Bad(
        TensorKindError,
        "query must be a plain tensor, but is a FakeTensor, whose memory cannot be read. Pass a "
        "plain tensor, such as its local or materialised part.",
        lambda: {"query": fake()},
    ),
    "a tensor subclass": Bad(
        TensorKindError,
        "key must be a plain tensor, but is a TwoTensor, whose memory cannot be read.",
        lambda: {"key": TwoTensor(tensor(B, HQ, S, D), tensor(B, HQ, S, D))},
        torch_raises=NotImplementedError,
    ),
}

NUMBERS = {
    "scale NaN": Bad(
        ArgumentError,
        "scale must be a finite number, but is nan. Leave it out for 1/sqrt(head_dim).",
        lambda: {"scale": math.nan},
    ),
    "scale text": Bad(
        ArgumentError,
        "scale must be a finite number, but is 'big'.",
        lambda: {"scale": "big"},
        torch_raises=TypeError,
    ),
    "scale of two numbers": Bad(
        ArgumentError,
        "scale must be a finite number, but is tensor([1., 1.]).",
        lambda: {"scale": tensor(2)},
    ),
    "learned scale": Bad(
        ArgumentError,
        "scale must be a number, but is a tensor that requires grad, and would get no gradient. "
        "Multiply the query by it, or the score in a score_mod.",
        lambda: {"scale": torch.ones((), requires_grad=True)},
    ),
    "dropout above 1": Bad(
        ArgumentError,
        "dropout_p must be a number from 0 to 1, but is 1.5. Use 0.0 to switch it off.",
        lambda: {"dropout_p": 1.5},
    ),
    "dropout below 0": Bad(
        ArgumentError,
        "dropout_p must be a number from 0 to 1, but is -0.1.",
        lambda: {"dropout_p": -0.1},
    ),
    "dropout NaN": Bad(
        ArgumentError,
        "dropout_p must be a number from 0 to 1, but is nan.",
        lambda: {"dropout_p": math.nan},
    ),
    "dropout None": Bad(
        ArgumentError,
        "dropout_p must be a number from 0 to 1, but is None.",
        lambda: {"dropout_p": None},
    ),
    "generator": Bad(
        ArgumentError,
        "generator must be a torch.Generator, but is int. Use torch.Generator().manual_seed(0).",
        lambda: {"generator": 3, "dropout_p": 0.5},
    ),
    "sinks for other heads": Bad(
        ShapeError,
        "sink must hold one number per query head, shape [4], but has shape [3]. Use "
        "sink.expand(4) if all heads have one value.",
        lambda: {"sink": tensor(3)},
    ),
    "one sink for all": Bad(
        ShapeError,
        "sink must hold one number per query head, shape [4], but has shape [].",
        lambda: {"sink": tensor()},
    ),
    "integer sinks": Bad(
        DtypeError,
        f"sink must be one of {FLOATS}, but is int64.",
        lambda: {"sink": tensor(HQ, dtype=torch.int64)},
    ),
    "sinks elsewhere": Bad(
        DeviceError,
        "sink must be on cpu, as the query, but is on meta. Move it with .to(device).",
        lambda: {"sink": tensor(HQ, device="meta")},
    ),
    "sinks in a list": Bad(
        ArgumentError,
        "sink must be a torch.Tensor, but is list.",
        lambda: {"sink": [0.0] * HQ},
    ),
    "negative start": Bad(
        ArgumentError,
        "Dense.start must be a position, an integer of at least 0 and below 2**61, but is -1. "
        "Count tokens from the first of the sequence.",
        call=lambda: attend(Dense(tensor(B, HQ, S, D), tensor(B, HQ, S, D), start=-1)),
    ),
    "negative q_start": Bad(
        ArgumentError,
        "q_start must be a position, an integer of at least 0 and below 2**61, but is -3.",
        call=lambda: attend(q_start=-3),
    ),
    "q_start in between": Bad(
        ArgumentError,
        "q_start must be a position, an integer of at least 0 and below 2**61, but is 1.5.",
        call=lambda: attend(q_start=1.5),
    ),
    "a start that no kernel can compute with": Bad(
        ArgumentError,
        f"Dense.start must be a position, an integer of at least 0 and below 2**61, but is {2**61}",
        call=lambda: attend(Dense(tensor(B, HQ, S, D), tensor(B, HQ, S, D), start=2**61)),
    ),
    "q_start that no kernel can compute with": Bad(
        ArgumentError,
        f"q_start must be a position, an integer of at least 0 and below 2**61, but is {2**62}",
        call=lambda: attend(q_start=2**62),
    ),
    "captures on another device": Bad(
        DeviceError,
        "a captured tensor must be on cpu, as the query, but one of shape [3] is on meta. Move it "
        "with .to(device).",
        lambda: {"score_mod": adds(tensor(3, device="meta"))},
    ),
    "no memory": Bad(
        ArgumentError,
        "memory must be a Dense, a Ragged or a Paged, but is a Tensor. Wrap keys and values: "
        "Dense(key, value).",
        call=lambda: attend(tensor(B, HQ, S, D)),
    ),
}

OPTIONS = {
    "backend": Bad(
        ArgumentError,
        "backend must be one of auto, ",
        lambda: {"backend": "cuda"},
    ),
    "backend that cannot": Bad(
        BackendError,
        "backend='inductor' cannot run this call:\n  inductor: PyTorch's flex_attention has no "
        "dropout, and dropout_p is not 0.\n",
        lambda: {"backend": "inductor", "dropout_p": 0.5},
    ),
    "return_aux": Bad(
        OptionError,
        "return_aux must be an AuxRequest, but is a bool. Use return_aux=AuxRequest(lse=True).",
        lambda: {"return_aux": True},
    ),
    "return_aux of attention": Bad(
        OptionError,
        "return_aux must be an AuxRequest, but is a dict.",
        call=lambda: attend(return_aux={"lse": True}),
    ),
    "return_lse and return_aux": Bad(
        OptionError,
        "only one of return_lse and return_aux must be given, but both are. Use "
        "return_aux=AuxRequest(lse=True) alone.",
        lambda: {"return_lse": True, "return_aux": AuxRequest()},
        torch_raises=ValueError,
    ),
    "options in a list": Bad(
        ArgumentError,
        "kernel_options must be a dict, but is a list. See FlexKernelOptions.",
        lambda: {"kernel_options": [1]},
        torch_raises=TypeError,
    ),
    "BACKEND": Bad(
        OptionError,
        "kernel_options['BACKEND'] must be one of AUTO, TRITON, FLASH, TRITON_DECODE, but is "
        "'CPU'. Leave it out: it has no meaning on a CPU.",
        lambda: {"kernel_options": {"BACKEND": "CPU"}},
        torch_raises=ValueError,
    ),
    "BACKEND and the knob it replaces": Bad(
        OptionError,
        "kernel_options must not have both BACKEND and FORCE_USE_FLEX_ATTENTION, which BACKEND "
        "replaces, but has both. Drop FORCE_USE_FLEX_ATTENTION.",
        lambda: {"kernel_options": {"BACKEND": "AUTO", "FORCE_USE_FLEX_ATTENTION": True}},
        torch_raises=RuntimeError,
    ),
    "OUTPUT_LOGSUMEXP": Bad(
        OptionError,
        "kernel_options must not contain OUTPUT_LOGSUMEXP, since return_aux decides which outputs "
        "are written, but does. Use return_aux=AuxRequest(...).",
        lambda: {"kernel_options": {"OUTPUT_LOGSUMEXP": True}},
        torch_raises=AssertionError,
    ),
    "an option without a name": Bad(
        OptionError,
        "kernel_options must have strings as keys, but has 3. See FlexKernelOptions.",
        lambda: {"kernel_options": {3: 1}},
    ),
}

ONE_LINE = "write torch.where(condition, a, b)"

MODS = {
    "no function": Bad(
        NotCallableError,
        "score_mod must be a function of (score, b, h, q_idx, kv_idx), but is a float. Pass the "
        "function itself.",
        lambda: {"score_mod": 3.0},
        torch_raises=TypeError,
    ),
    "a tensor for a mask": Bad(
        NotCallableError,
        "mask_mod must be a function of (b, h, q_idx, kv_idx), but is a Tensor.",
        lambda: {"mask_mod": tensor(L, S) > 0},
    ),
    "a block mask for a mask": Bad(
        NotCallableError,
        "mask_mod must be a function of (b, h, q_idx, kv_idx), but is a BlockMask. Give it as "
        "block_mask=.",
        lambda: {"mask_mod": mask(None, None, L, S)},
    ),
    "a mask for a score": Bad(
        ModSignatureError,
        "score_mod must take 5 arguments (score, b, h, q_idx, kv_idx), but 'causal' takes 4. "
        "Change its signature.",
        lambda: {"score_mod": causal},
        torch_raises=TypeError,
    ),
    "a score for a mask": Bad(
        ModSignatureError,
        "mask_mod must take 4 arguments (b, h, q_idx, kv_idx), but 'branch' takes 5.",
        lambda: {"mask_mod": branch},
    ),
    "no result": Bad(
        ModResultError,
        "score_mod 'nothing' must return one scalar for each element, but returned NoneType. Is a "
        "return statement missing?",
        lambda: {"score_mod": nothing},
        torch_raises=ValueError,
    ),
    "two results": Bad(
        ModResultError,
        "score_mod 'two' must return one scalar for each element, but returned tuple.",
        lambda: {"score_mod": two},
        torch_raises=TypeError,
    ),
    "a whole tensor": Bad(
        ModResultError,
        "score_mod 'whole_tensor' must return one scalar for each element, but returned a tensor "
        "of shape [3]. Reduce or index it.",
        lambda: {"score_mod": whole_tensor},
    ),
    "a number for a mask": Bad(
        ModResultError,
        "mask_mod 'difference' must return a truth value, but returned torch.int64. Compare, as in "
        "q_idx >= kv_idx, or convert with .bool().",
        lambda: {"mask_mod": difference},
    ),
    "an opaque number for a mask": Bad(
        ModResultError,
        "mask_mod 'opaque_mask' must return a truth value, but returned torch.float32.",
        lambda: {"mask_mod": opaque_mask},
    ),
    "a Python if": Bad(
        TracedBranchError,
        "a Python branch on a traced value at test_bad_inputs.py:N: `return score if q_idx >= "
        f"kv_idx else score * 2`. A mod runs once for all elements, so Python cannot choose for "
        f"each: {ONE_LINE}",
        lambda: {"score_mod": branch},
        torch_raises=RuntimeError,
    ),
    "a Python and": Bad(
        TracedBranchError,
        "a Python branch on a traced value at test_bad_inputs.py:N: `return bool(q_idx > kv_idx "
        "and kv_idx > 1)`.",
        lambda: {"mask_mod": conjunction},
    ),
    "chained comparisons": Bad(
        TracedBranchError,
        "a Python branch on a traced value at test_bad_inputs.py:N: `return bool(0 <= q_idx - "
        "kv_idx < 3)`.",
        lambda: {"mask_mod": chain},
    ),
    "a Python number": Bad(
        TracedBranchError,
        "the value of a traced number was asked for at test_bad_inputs.py:N: `return score * "
        "float(q_idx)`.",
        lambda: {"score_mod": number},
        torch_raises=RuntimeError,
    ),
    "an index into a list": Bad(
        TracedBranchError,
        "the value of a traced number was asked for at test_bad_inputs.py:N: `return score * "
        "[1, 2, 3, 4][h]`.",
        lambda: {"score_mod": python_list},
        torch_raises=RuntimeError,
    ),
    "a Python if in an opaque mod": Bad(
        TracedBranchError,
        "score_mod 'opaque_branch' must be computed for all elements at once, but asks for the "
        "value of a single element, as a Python branch does. Write torch.where(condition, a, b).",
        lambda: {"score_mod": opaque_branch},
        torch_raises=RuntimeError,
    ),
    "an index out of range": Bad(
        CapturedIndexError,
        "index 3 is out of bounds for dimension 0 with size 3 of a captured tensor of shape [3] "
        "at test_bad_inputs.py:N: `return score + BIAS[kv_idx]`. Clamp the index",
        lambda: {"score_mod": beyond},
        torch_raises=IndexError,
    ),
    "an index below the range": Bad(
        CapturedIndexError,
        "index -4 is out of bounds for dimension 0 with size 3 of a captured tensor of shape [3] "
        "at test_bad_inputs.py:N: `return BIAS[-kv_idx] >= 0`.",
        lambda: {"mask_mod": beyond_below},
    ),
    "an index out of range in an opaque mod": Bad(
        CapturedIndexError,
        "the indices in score_mod 'opaque_beyond' must be inside of the captured tensor, but index "
        "3 is out of bounds for dimension 0 with size 3. Clamp the index to the tensor's size.",
        lambda: {"score_mod": opaque_beyond},
        torch_raises=IndexError,
    ),
    "a float for an index": Bad(
        CapturedIndexError,
        "a captured tensor was indexed by a torch.float32 at test_bad_inputs.py:N: `return score + "
        "BIAS[score]`.",
        lambda: {"score_mod": float_index},
        torch_raises=IndexError,
    ),
    "too many indices": Bad(
        CapturedIndexError,
        "2 indices for 1 dimensions of a captured tensor at test_bad_inputs.py:N: `return score + "
        "BIAS[q_idx, kv_idx]`.",
        lambda: {"score_mod": many_indices},
        torch_raises=IndexError,
    ),
    "division by zero": Bad(
        DivisionByZeroError,
        "the divisor of integers must not be 0, but is at test_bad_inputs.py:N: `return score + "
        "q_idx // kv_idx`. Clamp it with .clamp(min=1)",
        lambda: {"score_mod": by_zero},
        torch_raises=RuntimeError,
    ),
    "a composed text": Bad(
        NotCallableError,
        "argument 2 of and_masks must be a mod, that is a function such as causal or "
        "sliding_window(256), but is 'causal'.",
        call=lambda: and_masks(causal, "causal"),  # type: ignore[arg-type]
    ),
}

BLOCK_MASKS = {
    "other batches": Bad(
        BlockMaskShapeError,
        "a block mask must have B=2, as the query, or B=1, but has B=3: block_mask.shape="
        "(3, 1, 5, 6), and the query has B=2, H=4.",
        lambda: {"block_mask": mask(3, None, L, S)},
    ),
    "other heads": Bad(
        BlockMaskShapeError,
        "a block mask must have H=4, as the query, or H=1, but has H=2: block_mask.shape="
        "(1, 2, 5, 6), and the query has B=2, H=4.",
        lambda: {"block_mask": mask(None, 2, L, S)},
    ),
    "shorter": Bad(
        BlockMaskShapeError,
        "a block mask must be for q_len=5 and kv_len=6, but was created for "
        "block_mask.shape=(1, 1, 5, 4). It was created for a smaller length",
        lambda: {"block_mask": mask(None, None, L, 4)},
        torch_raises=RuntimeError if MASKS_MENDED else ValueError,
    ),
    "longer": Bad(
        BlockMaskShapeError,
        "a block mask must be for q_len=5 and kv_len=6, but was created for "
        "block_mask.shape=(1, 1, 300, 6). It was created for a larger length",
        lambda: {"block_mask": mask(None, None, 300, S)},
        torch_raises=RuntimeError if MASKS_MENDED else ValueError,
    ),
    "sliced": Bad(
        SlicedMaskError,
        "Cannot use mask_mod from a sliced BlockMask",
        lambda: {"block_mask": mask(None, None, L, S)[:, :, :1]},
        torch_raises=RuntimeError,
    ),
    "elsewhere": Bad(
        DeviceError,
        "Expect q/k/v and block_mask to be on the same device but got cpu and meta. Move the mask "
        "with block_mask.to('cpu').",
        lambda: {"block_mask": mask(None, None, L, S).to("meta")},
        torch_raises=RuntimeError,
    ),
    "a function": Bad(
        BlockMaskError,
        "block_mask must be a BlockMask, but is a function. Give a function as mask_mod=, or make "
        "a mask of it with create_block_mask.",
        lambda: {"block_mask": causal},
    ),
    "a tensor": Bad(
        BlockMaskError,
        "block_mask must be a BlockMask, but is a Tensor.",
        lambda: {"block_mask": tensor(L, S)},
    ),
    "a negative length": Bad(
        ArgumentError,
        "Q_LEN must be a whole number of at least 0, but is -1.",
        call=lambda: mask(None, None, -1, S),
    ),
    "negative batches": Bad(
        ArgumentError,
        "B must be a whole number of at least 0, but is -2.",
        call=lambda: mask(-2, None, L, S),
    ),
    "no block size": Bad(
        ArgumentError,
        "BLOCK_SIZE[0] must be a whole number of at least 1, but is 0.",
        call=lambda: mask(None, None, L, S, BLOCK_SIZE=0),
    ),
    "three block sizes": Bad(
        ArgumentError,
        "BLOCK_SIZE must be an int or a pair (q_block, kv_block), but is (1, 2, 3).",
        call=lambda: mask(None, None, L, S, BLOCK_SIZE=(1, 2, 3)),
    ),
    "a block mask of a score": Bad(
        ModSignatureError,
        "create_block_mask requires a mask_mod(b, h, q_idx, kv_idx), but 'branch' has",
        call=lambda: create_block_mask(branch, None, None, L, S),
    ),
    "a mask of three arguments": Bad(
        ModSignatureError,
        "a mod must be a mask_mod(b, h, q_idx, kv_idx) or a score_mod(score, b, h, q_idx, kv_idx)",
        call=lambda: create_mask(lambda b, h, q_idx: q_idx > 0, None, None, L, S),
    ),
    "counts for other rows": Bad(
        BlockMaskError,
        "kv_num_blocks must have the shape of kv_indices without its last dimension",
        call=lambda: lists([[[1]]], [[[[0], [0]]]]),
    ),
    "float indices": Bad(
        BlockMaskError,
        "kv_indices must hold integers, but is float32.",
        call=lambda: lists([[[1]]], [[[[0.0]]]]),
    ),
    "more blocks than entries": Bad(
        BlockMaskError,
        "kv_num_blocks must be between 0 and 1, the entries in a row of kv_indices, but is 2",
        call=lambda: lists([[[2]]], [[[[0]]]]),
    ),
    "no such block": Bad(
        BlockMaskError,
        "kv_indices must be between 0 and 0, since seq_lengths and BLOCK_SIZE make 1 blocks, "
        "but is 7",
        call=lambda: lists([[[1]]], [[[[7]]]]),
    ),
    "no such row": Bad(
        BlockIndexError,
        "an index into a dimension of size 1 of a block mask must be from -1 to 0, but is 5. Count "
        "batches, heads and rows of blocks, not tokens.",
        call=lambda: mask(None, None, L, S)[0, 0, 5],
    ),
    "pickled": Bad(
        MaskPickleError,
        "a mask that is written must have a mask_mod that can be traced",
        call=lambda: __import__("pickle").dumps(
            lists([[[1]]], [[[[0]]]], mask_mod=lambda b, h, q, kv: torch.lgamma(q + 1.0) > 0)
        ),
    ),
}

TABLES = {
    "operands": OPERANDS,
    "numbers": NUMBERS,
    "options": OPTIONS,
    "mods": MODS,
    "block masks": BLOCK_MASKS,
}
ROWS = [
    pytest.param(bad, id=f"{table}: {name}")
    for table, rows in TABLES.items()
    for name, bad in rows.items()
]


def test_the_table_is_long_enough() -> None:
    assert len(ROWS) >= 90


@pytest.mark.parametrize("bad", ROWS)
@pytest.mark.filterwarnings("ignore::quire.EagerModWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_it_is_refused_by_name_and_nothing_changes(bad: Bad) -> None:
    state, bias = torch.get_rng_state(), BIAS.clone()
    with pytest.raises(bad.error) as caught:
        bad.run()
    assert caught.type is bad.error
    message = re.sub(r"\.py:\d+", ".py:N", str(caught.value))
    assert bad.message
    assert message.startswith(bad.message)
    assert re.search(r"[.:`,] .*[.?]$", message, re.DOTALL), "what to do is missing"
    assert torch.equal(torch.get_rng_state(), state), "a refused call drew random numbers"
    assert torch.equal(BIAS, bias)


@pytest.mark.parametrize("bad", [row for row in ROWS if row.values[0].torch_raises is not None])
def test_torch_raises_a_type_that_ours_is(bad: Bad) -> None:
    assert bad.torch_raises is not None
    assert bad.change is not None
    assert issubclass(bad.error, bad.torch_raises)
    with pytest.raises(bad.torch_raises):
        torch_flex.flex_attention(**{**operands(), **bad.change()})

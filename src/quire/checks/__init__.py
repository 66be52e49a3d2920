"""Checks of the tensors and numbers of a call. They run before anything is computed or written."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from quire.checks.arguments import dtype_name
from quire.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    HeadsError,
    RankError,
    ShapeError,
    TensorKindError,
)
from quire.support.torch_private import (
    is_batched,
    is_fake,
    is_legacy_batched,
    is_wrapped,
    lost_memory,
    unwrapped,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KV_DTYPES = (*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
"""Keys and values may also be stored as float8, in fewer bits than they are computed with."""
PAGE_DTYPES = (*KV_DTYPES, torch.int8)
"""Pages may also hold int8, with a scale for each row."""
SCALED_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
"""The dtypes whose rows may have scales; rows of int8 must."""

DENSE_AXES = ("batch", "heads", "length", "head_dim")
PACKED_AXES = ("total", "heads", "head_dim")
PAGE_AXES = ("pages", "heads", "rows", "head_dim")


def check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check query [B, Hq, L, D], key [B or 1, Hkv, S, D] and value [B or 1, Hkv, S, Dv]."""
    _check_tensors(query, key, value, DENSE_AXES, "Add the missing ones with .unsqueeze.")
    if key.shape[0] not in (query.shape[0], 1):
        raise ShapeError(
            f"query and key must have the same batch size, but have Bq={query.shape[0]} and "
            f"Bkv={key.shape[0]}. Repeat the keys, or give keys with a batch size of 1."
        )
    _check_sizes(query, key, value, "batch, heads and length")


def check_packed(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check query [total, Hq, D], key [total, Hkv, D] and value [total, Hkv, Dv]."""
    _check_tensors(query, key, value, PACKED_AXES, "Pack the rows of all sequences into the first.")
    _check_sizes(query, key, value, "rows and heads")


def check_paged(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check query [B, Hq, L, D] or [total, Hq, D], and pages [P, Hkv, page, D or Dv]."""
    named = {"query": query, "key": key, "value": value}
    check_kinds(named)
    check_device(**named)
    packed = query.dim() == 3
    advice = "Give [total, heads, head_dim] with q_offsets, or equally many queries per sequence."
    check_rank("query", query, PACKED_AXES if packed else DENSE_AXES, advice)
    check_dtype("query", query)
    for name, tensor in (("key", key), ("value", value)):
        check_rank(name, tensor, PAGE_AXES, "Give pages, which hold rows for each head.")
        check_dtype(name, tensor, PAGE_DTYPES)
    _check_sizes(query, key, value, "pages, heads and rows")
    if key.shape[2] == 0:
        raise ShapeError(
            f"pages must have at least one row, but key has shape {list(key.shape)}. Use pages of "
            f"16 to 128 rows."
        )


def check_scales(key: Tensor, key_scale: object, value: Tensor, value_scale: object) -> None:
    """Check that pages [P, Hkv, page, D] have scales [P, Hkv, page] if they need any.

    Pages of int8 must have scales, pages of float8 may, and others must not.
    """
    for name, pages, scale in (("key", key, key_scale), ("value", value, value_scale)):
        wrong = pages.dtype == torch.int8 if scale is None else pages.dtype not in SCALED_DTYPES
        if wrong:
            raise ArgumentError(
                f"{name} pages of int8 must come with {name}_scale, those of float8 may, and "
                f"others must not, but they are {pages.dtype} and {name}_scale is "
                f"{'None' if scale is None else 'given'}. Give one float32 scale for each row of "
                f"each head, {list(pages.shape[:3])}, or pages of another dtype."
            )
        if scale is None:
            continue
        check_kind(f"{name}_scale", scale)
        assert isinstance(scale, Tensor)
        check_unmapped(f"{name}_scale", scale)
        if scale.dtype != torch.float32 or scale.shape != pages.shape[:3]:
            raise ShapeError(
                f"{name}_scale must be float32 {list(pages.shape[:3])}, a scale for each row of "
                f"each head, but is {dtype_name(scale.dtype)} {list(scale.shape)}. Divide the "
                f"largest absolute value of each row by the largest number of the dtype."
            )
        if scale.device != pages.device:
            raise DeviceError(
                f"{name}_scale must be on {pages.device}, as its pages, but is on {scale.device}. "
                f"Move it with .to(device)."
            )


def _check_tensors(
    query: Tensor, key: Tensor, value: Tensor, axes: tuple[str, ...], advice: str
) -> None:
    """Check that three tensors can be read, and their device, rank and dtypes."""
    named = {"query": query, "key": key, "value": value}
    check_kinds(named)
    check_device(**named)
    for name, tensor in named.items():
        check_rank(name, tensor, axes, advice)
        check_dtype(name, tensor, DTYPES if name == "query" else KV_DTYPES)


def check_strided(name: str, tensor: object) -> None:
    """Check that `tensor` is a strided tensor, of any subclass and inside any transform."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(
            f"{name} must be a torch.Tensor, but is {type(tensor).__name__}. Convert it with "
            f"torch.as_tensor."
        )
    if tensor.is_nested:
        raise TensorKindError(
            f"{name} must be a dense tensor, but is a NestedTensor. Pad it with "
            f"torch.nested.to_padded_tensor."
        )
    if tensor.layout != torch.strided:
        raise TensorKindError(
            f"{name} must be a strided tensor, but has layout {tensor.layout}. Convert it with "
            f".to_dense()."
        )


_SHAPES_ONLY = ContextVar("shapes_only", default=False)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Let fake tensors pass: a graph is being made, and only shapes are used."""
    token = _SHAPES_ONLY.set(True)
    try:
        yield
    finally:
        _SHAPES_ONLY.reset(token)


def check_kind(name: str, tensor: object) -> None:
    """Check that `tensor` is a plain strided tensor, whose memory a kernel can read."""
    check_kinds({name: tensor})


def check_kinds(named: Mapping[str, object]) -> None:
    """Check that all are plain strided tensors, whose memory a kernel can read."""
    tensors = {name: _plain(name, tensor) for name, tensor in named.items()}
    if not _SHAPES_ONLY.get():
        check_held(tensors)


def _plain(name: str, tensor: object) -> Tensor:
    """Return a plain strided tensor. If only shapes are used, it may be a fake one."""
    check_strided(name, tensor)
    assert isinstance(tensor, Tensor)
    if is_legacy_batched(tensor):
        check_unmapped(name, tensor)
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    if not plain and not (_SHAPES_ONLY.get() and is_fake(tensor)):
        raise TensorKindError(
            f"{name} must be a plain tensor, but is a {type(tensor).__name__}, whose memory cannot "
            f"be read. Pass a plain tensor, such as its local or materialised part."
        )
    return tensor


def check_unmapped(name: str, tensor: Tensor) -> None:
    """Check that torch.vmap does not map a tensor, whose values are read before anything else."""
    if is_vmapped(tensor):
        raise TensorKindError(
            f"{name} must be the same for all calls, but is a tensor inside torch.vmap. Map the "
            f"operands or captured tensors alone, or call attention in a loop."
        )


def check_held(named: Mapping[str, Tensor]) -> None:
    """Check that storages hold every element: `untyped_storage().resize_(0)` frees them."""
    for name, tensor in named.items():
        lost = lost_memory(tensor)
        if lost is not None:
            raise TensorKindError(
                f"{name} must have its memory, {lost.needed} bytes for shape {list(tensor.shape)}, "
                f"but its storage was resized to {lost.held}. Gather it, or resize the storage "
                f"back, before the call."
            )


def check_captured(tensor: Tensor, device: torch.device) -> None:
    """Check that a tensor that a mod captured can be read beside a query on `device`."""
    check_held({"a captured tensor": tensor})
    if tensor.device != device and not (tensor.is_cpu and tensor.dim() == 0):
        raise DeviceError(
            f"a captured tensor must be on {device}, as the query, but one of shape "
            f"{list(tensor.shape)} is on {tensor.device}. Move it with .to(device)."
        )


def is_vmapped(tensor: Tensor) -> bool:
    """Whether a tensor is inside torch.vmap, at any level of nested transforms."""
    if is_legacy_batched(tensor):  # from torch.autograd.grad(is_grads_batched=True)
        return True
    while is_wrapped(tensor):
        if is_batched(tensor):
            return True
        tensor = unwrapped(tensor)
    return False


def check_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that all tensors are on one device, which is not the meta device."""
    if not query.device == key.device == value.device:
        raise DeviceError(
            f"query, key and value must be on one device, but are on {query.device}, "
            f"{key.device} and {value.device}. Move them with .to(device)."
        )
    if query.device.type == "meta":
        raise DeviceError(
            "query, key and value must hold data, but are on the meta device. Create them on "
            "'cpu', or on a device that PyTorch's flex_attention supports."
        )


def check_rank(name: str, tensor: Tensor, axes: tuple[str, ...], advice: str) -> None:
    """Check that `tensor` has as many dimensions as there are `axes`."""
    if tensor.dim() != len(axes):
        raise RankError(
            f"{name} must have {len(axes)} dimensions [{', '.join(axes)}], but has shape "
            f"{list(tensor.shape)}. {advice}"
        )


def check_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Check that the dtype of `tensor` is one of `dtypes`."""
    if tensor.dtype not in dtypes:
        raise DtypeError(
            f"{name} must be one of {', '.join(map(dtype_name, dtypes))}, but is "
            f"{dtype_name(tensor.dtype)}. Convert it with .to(dtype)."
        )


def _check_sizes(query: Tensor, key: Tensor, value: Tensor, shared: str) -> None:
    """Check that D of query and key, the sizes `shared` by key and value, and heads fit together.

    Heads are dimension 1 of each. Key and value may differ in their last dimension only.
    """
    head_dim, q_heads, kv_heads = query.shape[-1], query.shape[1], key.shape[1]
    if key.shape[-1] != head_dim:
        raise ShapeError(
            f"query and key must have the same embedding dimension, but have {head_dim} and "
            f"{key.shape[-1]}. Project one of them."
        )
    if head_dim == 0:
        raise ShapeError(
            f"the embedding dimension of query and key must be at least 1, but is 0: they have "
            f"shapes {list(query.shape)} and {list(key.shape)}. Leave out empty projections."
        )
    if key.shape[:-1] != value.shape[:-1]:
        raise ShapeError(
            f"key and value must agree in {shared}, but have shapes {list(key.shape)} and "
            f"{list(value.shape)}. Only their last dimension may differ."
        )
    if kv_heads == 0 or q_heads % kv_heads != 0:
        raise HeadsError(
            f"the number of query heads must be a multiple of the number of key heads, but "
            f"Hq={q_heads} and Hkv={kv_heads}. Give a key head for each group of query heads."
        )


def check_scale(scale: object, head_dim: int) -> float:
    """Return the factor of the scores as a float: `scale`, or 1 / sqrt(head_dim) if it is None."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim or 1)  # `check_operands` refuses an empty head_dim
    if isinstance(scale, Tensor) and scale.numel() == 1:
        if scale.requires_grad:
            raise ArgumentError(
                "scale must be a number, but is a tensor that requires grad, and would get no "
                "gradient. Multiply the query by it, or the score in a score_mod."
            )
        check_held({"scale": scale})
        scale = math.nan if scale.is_meta else scale.item()
    number = _as_float(scale)
    if not math.isfinite(number):
        raise ArgumentError(
            f"scale must be a finite number, but is {scale!r}. Leave it out for 1/sqrt(head_dim)."
        )
    return number


def _as_float(value: object) -> float:
    """Return a real number as a float; NaN for anything else, and for one too large."""
    try:
        return float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        return math.nan


def check_sink(sink: object, query: Tensor) -> Tensor | None:
    """Return `sink` [Hq], a logit for each query head, or None."""
    if sink is None:
        return None
    check_kind("sink", sink)
    assert isinstance(sink, Tensor)
    if sink.shape != (query.shape[1],):
        raise ShapeError(
            f"sink must hold one number per query head, shape [{query.shape[1]}], but has shape "
            f"{list(sink.shape)}. Use sink.expand({query.shape[1]}) if all heads have one value."
        )
    check_dtype("sink", sink)
    if sink.device != query.device:
        raise DeviceError(
            f"sink must be on {query.device}, as the query, but is on {sink.device}. Move it with "
            f".to(device)."
        )
    return sink


POSITIONS = 2**61
"""First positions are below it: with lengths they are of 62 bits, the most that kernels take."""


def check_position(name: str, value: object) -> int:
    """Return `value`, a position in a sequence, if it is an int from 0 to `POSITIONS` - 1."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < POSITIONS:
        raise ArgumentError(
            f"{name} must be a position, an integer of at least 0 and below 2**61, but is "
            f"{value!r}. Count tokens from the first of the sequence."
        )
    return value


def check_generator(generator: object) -> None:
    """Check that dropout can draw its seed from `generator`. None is torch's default generator."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ArgumentError(
            f"generator must be a torch.Generator, but is {type(generator).__name__}. Use "
            f"torch.Generator().manual_seed(0)."
        )


def check_score(score: object) -> float:
    """Return `score`, which a score_mod is evaluated at, as a float."""
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ArgumentError(
            f"score must be a number, but is {score!r}. Give the score that the mod is to change."
        )
    return float(score)

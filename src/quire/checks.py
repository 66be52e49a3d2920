"""What attention accepts. Nothing is computed or written before all of this has passed."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

from quire.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    HeadsError,
    RankError,
    ShapeError,
    TensorKindError,
)
from quire.torch_private import (
    is_batched,
    is_legacy_batched,
    is_wrapped,
    lost_memory,
    unwrapped,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KV_DTYPES = (*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
"""Keys and values may be stored in fewer bits than they are computed with."""

DENSE_AXES = ("batch", "heads", "length", "head_dim")
PACKED_AXES = ("total", "heads", "head_dim")
PAGE_AXES = ("pages", "heads", "rows", "head_dim")


def check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    """query [B, Hq, L, D], key [B or 1, Hkv, S, D], value [B or 1, Hkv, S, Dv], Hkv divides Hq."""
    _check_tensors(query, key, value, DENSE_AXES, "Add the missing ones with .unsqueeze.")
    check_shapes(query, key, value)


def check_packed(query: Tensor, key: Tensor, value: Tensor) -> None:
    """query [total, Hq, D], key [total, Hkv, D], value [total, Hkv, Dv], Hkv divides Hq."""
    _check_tensors(query, key, value, PACKED_AXES, "Pack the rows of all sequences into the first.")
    if key.shape[:2] != value.shape[:2]:
        raise ShapeError(
            f"key and value must agree in rows and heads, but have shapes {list(key.shape)} and "
            f"{list(value.shape)}. Only their last dimension may differ."
        )
    check_head_dims(query, key)
    check_heads(query.shape[1], key.shape[1])


def check_paged(query: Tensor, key: Tensor, value: Tensor) -> None:
    """query [B, Hq, L, D] or [total, Hq, D], key [P, Hkv, page, D], value [P, Hkv, page, Dv]."""
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        check_kind(name, tensor)
    check_device(**named)
    packed = query.dim() == 3
    advice = "Give [total, heads, head_dim] with q_offsets, or as many queries for each sequence."
    check_rank("query", query, PACKED_AXES if packed else DENSE_AXES, advice)
    check_dtype("query", query)
    for name, tensor in (("key", key), ("value", value)):
        check_rank(name, tensor, PAGE_AXES, "Give pages: rows of one head lie within a page.")
        check_dtype(name, tensor, (*KV_DTYPES, torch.int8))
    if key.shape[:3] != value.shape[:3]:
        raise ShapeError(
            f"key and value must agree in pages, heads and rows, but have shapes "
            f"{list(key.shape)} and {list(value.shape)}. Only their last dimension may differ."
        )
    check_head_dims(query, key)
    check_heads(query.shape[1], key.shape[1])
    if key.shape[2] == 0:
        raise ShapeError(
            f"pages must have at least one row, but key has shape {list(key.shape)}. Pages of 16 "
            f"to 128 rows are usual."
        )


def check_scales(key: Tensor, key_scale: object, value: Tensor, value_scale: object) -> None:
    """Pages of int8, and no others, have a factor for each row of each head."""
    for name, pages, scale in (("key", key, key_scale), ("value", value, value_scale)):
        if (pages.dtype == torch.int8) != (scale is not None):
            raise ArgumentError(
                f"{name} pages of int8 must come with {name}_scale, and others without, but they "
                f"are {pages.dtype} and {name}_scale is {'None' if scale is None else 'given'}. "
                f"Give one float32 factor for each row of each head, {list(pages.shape[:3])}."
            )
        if scale is None:
            continue
        check_kind(f"{name}_scale", scale)
        assert isinstance(scale, Tensor)
        if scale.dtype != torch.float32 or scale.shape != pages.shape[:3]:
            raise ShapeError(
                f"{name}_scale must be float32 {list(pages.shape[:3])}, a factor for each row of "
                f"each head, but is {str(scale.dtype).removeprefix('torch.')} "
                f"{list(scale.shape)}. Take the largest absolute value of a row by 127."
            )
        if scale.device != pages.device:
            raise DeviceError(
                f"{name}_scale must be where its pages are, on {pages.device}, but is on "
                f"{scale.device}. Move it with .to(device)."
            )


def _check_tensors(
    query: Tensor, key: Tensor, value: Tensor, axes: tuple[str, ...], advice: str
) -> None:
    """Tensors that can be read, on one device, of dtypes that are computed with."""
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        check_kind(name, tensor)
    check_device(**named)
    for name, tensor in named.items():
        check_rank(name, tensor, axes, advice)
        check_dtype(name, tensor, DTYPES if name == "query" else KV_DTYPES)


def check_strided(name: str, tensor: object) -> None:
    """A tensor that torch operations take, whatever stands behind it."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(
            f"{name} must be a torch.Tensor, but got {type(tensor).__name__}. Convert it with "
            f"torch.as_tensor."
        )
    if tensor.is_nested:
        raise TensorKindError(
            f"{name} is a NestedTensor, and this function takes dense tensors. Pad it with "
            f"torch.nested.to_padded_tensor."
        )
    if tensor.layout != torch.strided:
        raise TensorKindError(
            f"{name} must be a strided tensor, but its layout is {tensor.layout}. Convert it with "
            f".to_dense()."
        )


def check_kind(name: str, tensor: object) -> None:
    """A plain strided tensor: one block of memory that can be read."""
    check_strided(name, tensor)
    assert isinstance(tensor, Tensor)
    if is_vmapped(tensor):
        raise TensorKindError(
            f"{name} is a tensor inside torch.vmap, which attention cannot look through. Put the "
            f"mapped dimension into the batch dimension."
        )
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TensorKindError(
            f"{name} is a {type(tensor).__name__}, which has no memory of its own to read. Pass a "
            f"plain tensor, such as its local or materialised part."
        )
    check_held(name, tensor)


def check_held(name: str, tensor: Tensor) -> None:
    """Memory for every element: `tensor.untyped_storage().resize_(0)` takes it away."""
    lost = lost_memory(tensor)
    if lost is not None:
        raise TensorKindError(
            f"{name} must have its memory, {lost.needed} bytes for shape {list(tensor.shape)}, but "
            f"its storage was resized to {lost.held}. Gather it, or resize the storage back, "
            f"before the call."
        )


def is_vmapped(tensor: Tensor) -> bool:
    """Whether torch.vmap stands behind a tensor, at any level of functorch's transforms."""
    if is_legacy_batched(tensor):  # of is_grads_batched=True
        return True
    while is_wrapped(tensor):
        if is_batched(tensor):
            return True
        tensor = unwrapped(tensor)
    return False


def check_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    """One device for all, and one that holds data."""
    if not query.device == key.device == value.device:
        raise DeviceError(
            f"query, key and value must be on one device, but are on {query.device}, "
            f"{key.device} and {value.device}. Move them with .to(device)."
        )
    if query.device.type == "meta":
        raise DeviceError(
            "query, key and value are on the meta device, which holds no data. Create them on "
            "'cpu', or on a device that PyTorch's flex_attention supports."
        )


def check_rank(name: str, tensor: Tensor, axes: tuple[str, ...], advice: str) -> None:
    """As many dimensions as there are axes."""
    if tensor.dim() != len(axes):
        raise RankError(
            f"{name} must have {len(axes)} dimensions [{', '.join(axes)}], but has shape "
            f"{list(tensor.shape)}. {advice}"
        )


def check_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """One of the float dtypes that are computed with."""
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise DtypeError(
            f"{name} must be one of {allowed}, but is {tensor.dtype}. Convert it with .to(dtype)."
        )


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Batches, heads, lengths and head dims that go together."""
    batch = query.shape[0]
    check_head_dims(query, key)
    if key.shape[:3] != value.shape[:3]:
        raise ShapeError(
            f"key and value must agree in batch, heads and length, but have shapes "
            f"{list(key.shape)} and {list(value.shape)}. Only their last dimension may differ."
        )
    if key.shape[0] not in (batch, 1):
        raise ShapeError(
            f"query and key must have the same batch size, but have Bq={batch} and "
            f"Bkv={key.shape[0]}. Repeat the keys, or give one batch of keys for all."
        )
    check_heads(query.shape[1], key.shape[1])


def check_head_dims(query: Tensor, key: Tensor) -> None:
    """A product of query and key exists."""
    head_dim = query.shape[-1]
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


def check_heads(q_heads: int, kv_heads: int) -> None:
    """Every key head serves as many query heads."""
    if kv_heads == 0 or q_heads % kv_heads != 0:
        raise HeadsError(
            f"the number of query heads must be a multiple of the number of key heads, but "
            f"Hq={q_heads} and Hkv={kv_heads}. Each key head serves Hq / Hkv query heads."
        )


def check_scale(scale: object, head_dim: int) -> float:
    """The factor on query @ key: `scale`, or 1 / sqrt(head_dim)."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, Tensor) and scale.numel() == 1:
        if scale.requires_grad:
            raise ArgumentError(
                "scale must be a number, but is a tensor that requires grad, and would not learn. "
                "Multiply the query by it, or the score in a score_mod."
            )
        check_held("scale", scale)
        scale = math.nan if scale.is_meta else scale.item()
    number = _as_float(scale)
    if not math.isfinite(number):
        raise ArgumentError(
            f"scale must be a finite number, but got {scale!r}. Leave it out for 1/sqrt(head_dim)."
        )
    return number


def _as_float(value: object) -> float:
    """A real number as a float; NaN where there is none that could stand for it."""
    try:
        return float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        return math.nan


def check_sink(sink: object, query: Tensor) -> Tensor | None:
    """One logit per query head."""
    if sink is None:
        return None
    check_kind("sink", sink)
    assert isinstance(sink, Tensor)
    if sink.shape != (query.shape[1],):
        raise ShapeError(
            f"sink must hold one number per query head, shape [{query.shape[1]}], but has shape "
            f"{list(sink.shape)}. Use sink.expand({query.shape[1]}) for one value for all heads."
        )
    check_dtype("sink", sink)
    if sink.device != query.device:
        raise DeviceError(
            f"sink must be on the query's device, but is on {sink.device} and the query on "
            f"{query.device}. Move it with .to(device)."
        )
    return sink


def check_position(name: str, value: object) -> int:
    """A position in a sequence."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ArgumentError(
            f"{name} must be a position, an integer of at least 0, but got {value!r}. Count tokens "
            f"from the first of the sequence."
        )
    return value


def check_generator(generator: object) -> None:
    """Where dropout draws its seed from: None for torch's default generator."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ArgumentError(
            f"generator must be a torch.Generator, but got {type(generator).__name__}. Use "
            f"torch.Generator().manual_seed(0)."
        )


def check_score(score: object) -> float:
    """A score that a score_mod is given, where one is asked what it does."""
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ArgumentError(
            f"expected score to be a number, got {score!r}. Give the score that the mod "
            f"is to change."
        )
    return float(score)

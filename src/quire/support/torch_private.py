"""Every private name of PyTorch's that quire stands on, each behind one function.

Goes in: a name that PyTorch may change without notice. Comes out: the function, or a safe answer.
Where there is none, whoever calls it is told the name and the version of PyTorch
(`TorchVersionError`), while everything that does not need the name goes on working.

Functions are bound once, at import, so that a call costs no more than PyTorch's own. Importing
Dynamo and Inductor takes seconds, so their names are looked up when they are at work.
"""

from __future__ import annotations

import importlib
import operator
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from quire.errors import TorchVersionError

TESTED = "2.13, 2.14 or 2.15"
"""The versions of PyTorch that have all of them."""


def named(module: str, name: str) -> Any:
    """What PyTorch keeps as `name`, which may have dots, in `module`; an error where it is gone."""
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise _gone(f"{module}.{name}") from error


def _gone(name: str) -> TorchVersionError:
    return TorchVersionError(
        f"expected PyTorch to have {name}, which quire uses here, but torch {torch.__version__} "
        f"does not. Install a version of torch that quire is tested with: {TESTED}."
    )


def _function(module: str, name: str) -> Callable[..., Any]:
    """The function of that name, or one that raises when it is called."""
    try:
        found: Callable[..., Any] = named(module, name)
    except TorchVersionError:

        def found(*_: object, **__: object) -> Any:
            raise _gone(f"{module}.{name}")

    return found


def _attribute(owner: str, name: str) -> Callable[[Any], Any]:
    """A function that reads the attribute of that name."""
    read = operator.attrgetter(name)

    def attribute(of: Any) -> Any:
        try:
            return read(of)
        except AttributeError as error:
            raise _gone(f"{owner}.{name}") from error

    return attribute


# --- torch.func and forward-mode AD --------------------------------------------------------------

_interpreter = _function("torch", "_C._functorch.peek_interpreter_stack")


def in_transform() -> bool:
    """Whether a transform of torch.func is at work, which wraps tensors: no value can be read."""
    return _interpreter() is not None


def is_transformed() -> bool:
    """Whether torch.func or forward-mode AD may stand behind a tensor; autograd knows how."""
    try:
        return _interpreter() is not None or forward_ad._current_level >= 0
    except AttributeError as error:
        raise _gone("torch.autograd.forward_ad._current_level") from error


is_wrapped: Callable[[Tensor], bool] = _function(
    "torch", "_C._functorch.is_functorch_wrapped_tensor"
)
"""Whether a tensor is one that a transform of torch.func made around another."""

is_batched: Callable[[Tensor], bool] = _function("torch", "_C._functorch.is_batchedtensor")
"""Whether torch.vmap is what wraps a tensor."""

is_legacy_batched: Callable[[Tensor], bool] = _function(
    "torch", "_C._functorch.is_legacy_batchedtensor"
)
"""Whether autograd computes many gradients at once, by the vmap it had before torch.func."""

unwrapped: Callable[[Tensor], Tensor] = _function("torch", "_C._functorch.get_unwrapped")
"""The tensor that is wrapped."""


# --- tensors -------------------------------------------------------------------------------------

has_storage: Callable[[Tensor], bool] = _function("torch", "_C._has_storage")
"""Whether a tensor has a storage that can be asked for."""

is_zero_tensor: Callable[[Tensor], bool] = _function("torch", "Tensor._is_zerotensor")
"""Whether a tensor is all zeros without memory, as autograd makes them."""


class Lost(NamedTuple):
    """How many bytes a tensor needs, and how many its storage has."""

    needed: int
    held: int


def lost_memory(tensor: Tensor) -> Lost | None:
    """Whether the storage of a tensor is too small for its elements; None where it is not."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    if tensor.numel() == 0 or not has_storage(tensor):
        return None
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
    held = tensor.untyped_storage().nbytes()
    return Lost(int(needed), held) if held < needed else None


def is_ordinary(tensor: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor on the CPU that is no more than its memory."""
    return (
        (type(tensor) is Tensor or type(tensor) is Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not is_wrapped(tensor)
        and not is_zero_tensor(tensor)
        and tensor.untyped_storage().nbytes() > 0
    )


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor, perhaps within a transform of torch.func, is in memory of the CPU."""
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return plain and tensor.is_cpu and not is_zero_tensor(tensor)


tree_leaves: Callable[[Any], list[Any]] = _function("torch.utils._pytree", "tree_leaves")
"""Everything within lists, tuples and dicts."""

tree_map: Callable[[Callable[[Any], Any], Any], Any] = _function("torch.utils._pytree", "tree_map")
"""The same lists, tuples and dicts around the results of a function."""


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no memory, as where torch.compile traces."""
    return bool(named("torch._subclasses.fake_tensor", "is_fake")(tensor))


def unsupported_operator(operator: Any) -> Exception:
    """What to raise for Dynamo to break its graph at `operator`."""
    error: Exception = named("torch._subclasses.fake_tensor", "UnsupportedOperatorException")(
        operator
    )
    return error


# --- block masks and pages -----------------------------------------------------------------------

_FLEX = "torch.nn.attention.flex_attention"
PAGED = "torch.nn.attention.experimental._paged_attention"
"""The module of PyTorch's `PagedAttention`."""


def is_torch_slice(mask_mod: object) -> bool:
    """Whether a mask_mod is the one that PyTorch gives to slices of a block mask.

    Safe if the name is gone: such a mask_mod raises by itself when it is called.
    """
    return mask_mod is getattr(importlib.import_module(_FLEX), "_sliced_mask_mod_error", _FLEX)


block_mask_tensors: Callable[[Any], tuple[str, ...]] = _attribute("BlockMask", "_TENSOR_ATTRS")
"""The names of the tensors that a block mask has."""

block_mask_context: Callable[[Any], tuple[str, ...]] = _attribute("BlockMask", "_CONTEXT_ATTRS")
"""The names of everything else that it has."""

_kv_order = _attribute("BlockMask", "_dq_kv_order")
_flatten = _attribute("BlockMask", "_flatten")
_unflatten = _attribute("BlockMask", "_unflatten")


def block_mask_order(mask: Any) -> Any:
    """In which order a block mask would have the gradients of its queries summed."""
    return _kv_order(mask)()


def flattened(mask: Any) -> tuple[tuple[Any, ...], Any]:
    """The tensors of a block mask and of its mask_mod, and what else makes it up."""
    leaves, context = _flatten(mask)()
    return tuple(leaves), context


def unflattened(like: Any, leaves: tuple[Any, ...], context: Any) -> Any:
    """A block mask of the class of `like` from what `flattened` gave."""
    return _unflatten(like)(leaves, context)


paged_assign = _function(PAGED, "PagedAttention.assign")
"""How PyTorch writes keys and values into pages."""

paged_convert = _function(PAGED, "PagedAttention.convert_logical_block_mask")
"""How PyTorch makes a mask over pages."""


# --- nested tensors ------------------------------------------------------------------------------

JAGGED = "torch.nested._internal.sdpa"
"""The module that F.scaled_dot_product_attention goes to with nested tensors."""
_NESTED = "torch.nested._internal.nested_tensor"

jagged_attention = _function(JAGGED, "jagged_scaled_dot_product_attention")
"""What it calls there."""

nested_size: Callable[[Any], tuple[Any, ...]] = _attribute("NestedTensor", "_size")
"""The shape, in which the ragged dimension is a symbol; asked without going through the class."""

ragged_dimension: Callable[[Any], int] = _attribute("NestedTensor", "_ragged_idx")
"""Which dimension is the ragged one."""

nested_values: Callable[[Any], Tensor] = _attribute("NestedTensor", "_values")
"""All rows, one sequence after the other, without a word to autograd."""

shortest: Callable[[Any], int | None] = _attribute("NestedTensor", "_maybe_min_seqlen")
"""The shortest sequence, if it is known."""

longest: Callable[[Any], int | None] = _attribute("NestedTensor", "_maybe_max_seqlen")
"""The longest sequence, if it is known."""

nested_view = _function(_NESTED, "nested_view_from_values_offsets_lengths")
"""A nested tensor that autograd knows to be a view of its values."""

_make_nested = _function(_NESTED, "NestedTensor")


def is_jagged(tensor: object) -> bool:
    """Whether something is a nested tensor in the layout torch.jagged."""
    kind = _make_nested if isinstance(_make_nested, type) else named(_NESTED, "NestedTensor")
    return isinstance(tensor, kind)


def nested_tensor(
    values: Tensor, offsets: Tensor, lengths: Tensor | None, ragged: int, known: dict[str, Tensor]
) -> Tensor:
    """A nested tensor around `values`, of which autograd is told nothing.

    `known` holds what it need not count: a tensor as long as "min_seqlen" and "max_seqlen" say.
    """
    made: Tensor = _make_nested(
        values, offsets, lengths=lengths, _ragged_idx=ragged, _metadata_cache=known
    )
    return made


without_hooks: Callable[[], Any] = getattr(torch._C, "DisableTorchFunctionSubclass", nullcontext)
"""Where nested tensors answer for themselves; each question to their class takes much longer.

Safe if the name is gone: the answers are the same.
"""

flash_attention_forward = _function("torch", "ops.aten._flash_attention_forward")
"""The operator whose multiplications PyTorch can count."""


# --- Dynamo and Inductor -------------------------------------------------------------------------


def skip_code(code: types.CodeType) -> None:
    """Have Dynamo run code as it is, unless what calls it is being traced."""
    skip = named("torch", "_C._dynamo.eval_frame._FrameAction.SKIP")
    strategy = named("torch", "_C._dynamo.eval_frame._FrameExecStrategy")(skip, skip)
    named("torch", "_C._dynamo.eval_frame.set_code_exec_strategy")(code, strategy)


def mark_disabled(function: Callable[..., Any], reason: str) -> None:
    """What `torch.compiler.disable` would write on a function; that one imports Dynamo."""
    function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)


def mark_original(function: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Have `torch.compile(function)` compile `original`, as if it were what was compiled before."""
    function.__dict__.update(
        _torchdynamo_orig_callable=original, _torchdynamo_wrapper_id=id(function)
    )


def mark_constant(function: Callable[..., Any]) -> None:
    """What `torch.compiler.assume_constant_result` would write; that one imports Dynamo."""
    function.__dict__.update(_dynamo_marked_constant=True)


def is_one_graph() -> bool:
    """Whether Dynamo is tracing in this thread where the graph may not break."""
    # The flags of torch.compiler hold for all threads; the translator is that of this one.
    translator = getattr(named("torch._dynamo.symbolic_convert", "tls"), "current_tx", None)
    if translator is None:
        return torch.compiler.is_exporting()
    whole = named("torch._dynamo.utils", "_get_error_on_graph_break")
    return bool(translator.one_graph or whole())


def compile_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises where it cannot compile."""
    names = ("TorchDynamoException", "FailOnRecompileLimitHit")
    return tuple(named("torch._dynamo.exc", name) for name in names)


def no_compiler_error() -> type[Exception]:
    """What Inductor raises where there is no C++ compiler."""
    kind: type[Exception] = named("torch._inductor.exc", "InvalidCxxCompiler")
    return kind


def has_avx2() -> bool:
    """Whether PyTorch finds AVX2, without which its flex_attention does not run on the CPU.

    Safe if the name is gone: PyTorch then says by itself what it lacks.
    """
    asked: Callable[[], bool] = getattr(torch.cpu, "_is_avx2_supported", lambda: True)
    return asked()

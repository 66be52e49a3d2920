"""Every private name of PyTorch that quire uses, each behind one function.

PyTorch may remove such a name at any time. If it has, a function here returns a safe answer, or
raises a `TorchVersionError` when it is called; everything else in quire goes on working.

Functions are bound once, at import, so that a call costs no more than PyTorch's own. Importing
Dynamo and Inductor takes seconds, so their names are looked up when they are called.
"""

from __future__ import annotations

import functools
import importlib
import operator
import types
from collections.abc import Callable, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from quire.errors import TorchVersionError

TESTED = "2.13, 2.14 or 2.15"
"""The versions of PyTorch that have all of these names."""


def named(module: str, name: str) -> Any:
    """Return the attribute `name` of `module`; it may have dots. Raise if PyTorch lacks it."""
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise _gone(f"{module}.{name}") from error


def _gone(name: str) -> TorchVersionError:
    return TorchVersionError(
        f"PyTorch must have {name}, which quire uses here, but torch {torch.__version__} does not. "
        f"Install a version of torch that quire is tested with: {TESTED}."
    )


def _function(module: str, name: str) -> Callable[..., Any]:
    """Return the function of that name; if it is gone, one that raises when it is called."""
    try:
        found: Callable[..., Any] = named(module, name)
    except TorchVersionError:

        def found(*_: object, **__: object) -> Any:
            raise _gone(f"{module}.{name}")

    return found


def _attribute(owner: str, name: str) -> Callable[[Any], Any]:
    """Return a function that reads the attribute of that name."""
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
    """Return whether a transform of torch.func is active: it wraps tensors, which hides values."""
    return _interpreter() is not None


def outside_transforms() -> Any:
    """Return a context in which no transform of torch.func is active, to read plain tensors.

    Inside of one, PyTorch wraps what it makes, and not even a plain tensor has numpy().
    """
    if not in_transform():
        return nullcontext()
    return named("torch._functorch.pyfunctorch", "temporarily_clear_interpreter_stack")()


def is_transformed() -> bool:
    """Return whether torch.func or forward-mode AD is active, which only autograd can handle."""
    try:
        return _interpreter() is not None or forward_ad._current_level >= 0
    except AttributeError as error:
        raise _gone("torch.autograd.forward_ad._current_level") from error


def is_dual() -> bool:
    """Return whether forward-mode AD is active, by itself or inside of torch.func."""
    return getattr(forward_ad, "_current_level", -1) >= 0


is_wrapped: Callable[[Tensor], bool] = _function(
    "torch", "_C._functorch.is_functorch_wrapped_tensor"
)
"""Return whether a transform of torch.func wraps this tensor."""

is_batched: Callable[[Tensor], bool] = _function("torch", "_C._functorch.is_batchedtensor")
"""Return whether torch.vmap wraps this tensor."""

is_legacy_batched: Callable[[Tensor], bool] = _function(
    "torch", "_C._functorch.is_legacy_batchedtensor"
)
"""Return whether a tensor holds many gradients at once, as `is_grads_batched=True` makes them."""

unwrapped: Callable[[Tensor], Tensor] = _function("torch", "_C._functorch.get_unwrapped")
"""Return the tensor inside a wrapper of torch.func."""


# --- tensors -------------------------------------------------------------------------------------

has_storage: Callable[[Tensor], bool] = _function("torch", "_C._has_storage")
"""Return whether a tensor has a storage."""

is_zero_tensor: Callable[[Tensor], bool] = _function("torch", "Tensor._is_zerotensor")
"""Return whether a tensor is one of autograd's zero tensors, which have no memory."""


class Lost(NamedTuple):
    """How many bytes a tensor needs, and how many its storage has."""

    needed: int
    held: int


def lost_memory(tensor: Tensor) -> Lost | None:
    """Return both sizes if the storage is too small for the elements of a tensor; else None."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    if tensor.numel() == 0 or not has_storage(tensor):
        return None
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
    held = tensor.untyped_storage().nbytes()
    return Lost(int(needed), held) if held < needed else None


def is_ordinary(tensor: object) -> TypeGuard[Tensor]:
    """Return whether this is a plain strided CPU tensor that has memory and no wrapper."""
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
    """Return whether a tensor is in CPU memory. A transform of torch.func may wrap it."""
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return plain and tensor.is_cpu and not is_zero_tensor(tensor)


tree_leaves: Callable[[Any], list[Any]] = _function("torch.utils._pytree", "tree_leaves")
"""Return all leaves of nested lists, tuples and dicts."""

tree_map: Callable[[Callable[[Any], Any], Any], Any] = _function("torch.utils._pytree", "tree_map")
"""Apply a function to all leaves of nested lists, tuples and dicts."""


_num_modes: Callable[[], int] = _function("torch", "_C._len_torch_dispatch_stack")


def without_modes() -> AbstractContextManager[object]:
    """Return a context in which no dispatch mode is active: new tensors are plain ones."""
    if _num_modes() == 0:
        return nullcontext()
    disabled: AbstractContextManager[object] = named(
        "torch.utils._python_dispatch", "_disable_current_modes"
    )()
    return disabled


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape and no memory, as under torch.compile."""
    return bool(named("torch._subclasses.fake_tensor", "is_fake")(tensor))


def unsupported_operator(operator: Any) -> Exception:
    """Return the exception that makes Dynamo break its graph at `operator`."""
    error: Exception = named("torch._subclasses.fake_tensor", "UnsupportedOperatorException")(
        operator
    )
    return error


def is_in_a_graph(tensor: Tensor) -> bool:
    """Return whether a tensor is fake or functional, since PyTorch is making a graph."""
    if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return False
    functional = named("torch._subclasses.functional_tensor", "FunctionalTensor")
    return isinstance(tensor, functional) or is_fake(tensor)


_is_profiling: Callable[[], bool] = _function("torch", "_C._autograd._profiler_enabled")


is_jit_tracing: Callable[[], bool] = _function("torch", "_C._is_tracing")
"""Return whether torch.jit.trace records, which sees no kernel, but sees operators."""


def is_watched() -> bool:
    """Return whether a mode, a profiler or torch.jit.trace sees the operators that are called."""
    return _num_modes() > 0 or _is_profiling() or is_jit_tracing()


def profiled(named: object, before: str = "") -> AbstractContextManager[object]:
    """Return a context whose time a profiler shows, if one records, under `before` + str(named)."""
    return torch.profiler.record_function(f"{before}{named}") if _is_profiling() else _UNSEEN


_UNSEEN = nullcontext()


# --- block masks and pages -----------------------------------------------------------------------

_FLEX = "torch.nn.attention.flex_attention"
PAGED = "torch.nn.attention.experimental._paged_attention"
"""The module of PyTorch's `PagedAttention`."""


def is_torch_slice(mask_mod: object) -> bool:
    """Return whether a mask_mod is the one that PyTorch gives to slices of a block mask.

    Safe if the name is gone: such a mask_mod raises by itself when it is called.
    """
    return mask_mod is getattr(importlib.import_module(_FLEX), "_sliced_mask_mod_error", _FLEX)


block_mask_tensors: Callable[[Any], tuple[str, ...]] = _attribute("BlockMask", "_TENSOR_ATTRS")
"""Return the names of a block mask's tensors."""

block_mask_context: Callable[[Any], tuple[str, ...]] = _attribute("BlockMask", "_CONTEXT_ATTRS")
"""Return the names of a block mask's other attributes."""

_kv_order = _attribute("BlockMask", "_dq_kv_order")
_flatten = _attribute("BlockMask", "_flatten")
_unflatten = _attribute("BlockMask", "_unflatten")


def block_mask_order(mask: Any) -> Any:
    """Return the order in which a block mask wants the gradients of its queries summed."""
    return _kv_order(mask)()


def flattened(mask: Any) -> tuple[tuple[Any, ...], Any]:
    """Return the tensors of a block mask and of its mask_mod, and its other attributes."""
    leaves, context = _flatten(mask)()
    return tuple(leaves), context


def unflattened(like: Any, leaves: tuple[Any, ...], context: Any) -> Any:
    """Return a block mask of the class of `like` from what `flattened` returned."""
    return _unflatten(like)(leaves, context)


paged_assign = _function(PAGED, "PagedAttention.assign")
"""PyTorch's method that writes keys and values into pages."""

paged_convert = _function(PAGED, "PagedAttention.convert_logical_block_mask")
"""PyTorch's method that turns a block mask into one over pages."""


# --- nested tensors ------------------------------------------------------------------------------

JAGGED = "torch.nested._internal.sdpa"
"""The module that F.scaled_dot_product_attention uses for nested tensors."""
_NESTED = "torch.nested._internal.nested_tensor"

jagged_attention = _function(JAGGED, "jagged_scaled_dot_product_attention")
"""The function that it calls there."""

nested_size: Callable[[Any], tuple[Any, ...]] = _attribute("NestedTensor", "_size")
"""Return the shape, with a symbol for the ragged dimension, without a slow dispatch."""

ragged_dimension: Callable[[Any], int] = _attribute("NestedTensor", "_ragged_idx")
"""Return the index of the ragged dimension."""

nested_values: Callable[[Any], Tensor] = _attribute("NestedTensor", "_values")
"""Return the rows of all sequences, one after the other, hidden from autograd."""

shortest: Callable[[Any], int | None] = _attribute("NestedTensor", "_maybe_min_seqlen")
"""Return the length of the shortest sequence; None if it is unknown."""

longest: Callable[[Any], int | None] = _attribute("NestedTensor", "_maybe_max_seqlen")
"""Return the length of the longest sequence; None if it is unknown."""

nested_view = _function(_NESTED, "nested_view_from_values_offsets_lengths")
"""Return a nested tensor that is a differentiable view of its values."""

_make_nested = _function(_NESTED, "NestedTensor")


def is_jagged(tensor: object) -> bool:
    """Return whether something is a nested tensor in the layout torch.jagged."""
    kind = _make_nested if isinstance(_make_nested, type) else named(_NESTED, "NestedTensor")
    return isinstance(tensor, kind)


def nested_tensor(
    values: Tensor, offsets: Tensor, lengths: Tensor | None, ragged: int, known: dict[str, Tensor]
) -> Tensor:
    """Return a nested tensor of `values` [total, ...], hidden from autograd.

    `known` may hold "min_seqlen" and "max_seqlen": tensors whose size is that length.
    """
    made: Tensor = _make_nested(
        values, offsets, lengths=lengths, _ragged_idx=ragged, _metadata_cache=known
    )
    return made


without_hooks: Callable[[], Any] = getattr(torch._C, "DisableTorchFunctionSubclass", nullcontext)
"""A context in which methods of nested tensors skip a slow dispatch.

Safe if the name is gone: results are the same.
"""

flash_attention_forward = _function("torch", "ops.aten._flash_attention_forward")
"""The operator whose FLOPs PyTorch can count."""


# --- Dynamo and Inductor -------------------------------------------------------------------------


def skip_code(code: types.CodeType) -> None:
    """Make Dynamo run code without tracing it, unless its caller is being traced."""
    skip = named("torch", "_C._dynamo.eval_frame._FrameAction.SKIP")
    strategy = named("torch", "_C._dynamo.eval_frame._FrameExecStrategy")(skip, skip)
    named("torch", "_C._dynamo.eval_frame.set_code_exec_strategy")(code, strategy)


def mark_disabled(function: Callable[..., Any], reason: str) -> None:
    """Mark a function as `torch.compiler.disable` does, without importing Dynamo."""
    function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)


def mark_original(function: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Make `torch.compile(function)` compile `original`, as if `function` were its result."""
    function.__dict__.update(
        _torchdynamo_orig_callable=original, _torchdynamo_wrapper_id=id(function)
    )


def mark_inlined(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Make Dynamo trace `other` wherever the code that it traces calls `function`."""
    function.__dict__.update(_torchdynamo_inline=other)


def mark_constant(function: Callable[..., Any]) -> None:
    """Mark a function as `torch.compiler.assume_constant_result` does, without importing Dynamo."""
    function.__dict__.update(_dynamo_marked_constant=True)


def is_one_graph() -> bool:
    """Return whether Dynamo is tracing in this thread and the graph may not break."""
    # The flags of torch.compiler are shared by all threads; the translator is this thread's own.
    translator = getattr(named("torch._dynamo.symbolic_convert", "tls"), "current_tx", None)
    if translator is None:
        return torch.compiler.is_exporting()
    whole = named("torch._dynamo.utils", "_get_error_on_graph_break")
    return bool(translator.one_graph or whole())


def compile_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that torch.compile raises if it cannot compile."""
    names = ("TorchDynamoException", "FailOnRecompileLimitHit")
    return tuple(named("torch._dynamo.exc", name) for name in names)


def no_compiler_error() -> type[Exception]:
    """Return the exception that Inductor raises if there is no C++ compiler."""
    kind: type[Exception] = named("torch._inductor.exc", "InvalidCxxCompiler")
    return kind


def has_avx2() -> bool:
    """Return whether PyTorch finds AVX2, which its flex_attention needs on the CPU.

    Safe if the name is gone: PyTorch then raises its own error.
    """
    is_supported: Callable[[], bool] = getattr(torch.cpu, "_is_avx2_supported", lambda: True)
    return is_supported()


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the buffers of a module by name, those that it has whenever the dict is read."""
    return module._buffers


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that changes when the tensor is written to; 0 if PyTorch counts nothing."""
    return 0 if tensor.is_inference() else tensor._version


def hooks_of(module: torch.nn.Module) -> tuple[Sized, ...]:
    """Return the functions that are called before and after a module's own forward and backward.

    A hook that is added later is in them, too.
    """
    forward = (module._forward_pre_hooks, module._forward_hooks)
    return *forward, module._backward_pre_hooks, module._backward_hooks


def hooks_made() -> int:
    """Return a number that grows with each hook that is added anywhere."""
    return int(_hook_handles().next_id)


@functools.cache
def _hook_handles() -> Any:
    return named("torch.utils.hooks", "RemovableHandle")


def global_hooks() -> tuple[Sized, Sized]:
    """Return the functions that are called before and after the forward of every module."""
    home = "torch.nn.modules.module"
    return named(home, "_global_forward_pre_hooks"), named(home, "_global_forward_hooks")


def parts_of(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the modules, parameters and buffers of a module by name, as they are when read."""
    return module._modules, module._parameters, module._buffers

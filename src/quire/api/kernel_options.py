"""The kernel options of PyTorch's flex_attention, which are checked and mostly ignored.

They tune Triton kernels on GPUs. On the CPU no option changes a result, so values are checked only
if PyTorch checks them. On other devices the options are passed to PyTorch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Literal, TypeAlias, TypedDict, get_args

from quire.errors import ArgumentError, OptionError
from quire.support.warn import warn

KernelBackend: TypeAlias = Literal["AUTO", "TRITON", "FLASH", "TRITON_DECODE"]


class FlexKernelOptions(TypedDict, total=False):
    """Options by name. Each may be prefixed with `fwd_` or `bwd_` for one of the two passes.

    On a CPU: BACKEND is checked, ROWS_GUARANTEED_SAFE and all others are ignored.
    """

    num_warps: int
    num_stages: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_M1: int
    BLOCK_N1: int
    BLOCK_M2: int
    BLOCK_N2: int
    PRESCALE_QK: bool
    ROWS_GUARANTEED_SAFE: bool
    BLOCKS_ARE_CONTIGUOUS: bool
    WRITE_DQ: bool
    FORCE_USE_FLEX_ATTENTION: bool
    USE_TMA: bool
    kpack: int
    matrix_instr_nonkdim: int
    waves_per_eu: int
    BACKEND: KernelBackend


KNOWN = frozenset(FlexKernelOptions.__annotations__)
OURS_TO_DECIDE = frozenset({"OUTPUT_LOGSUMEXP", "OUTPUT_MAX"})


class KernelOptionWarning(UserWarning):
    """A kernel option is unknown to PyTorch and to quire."""


def check_kernel_options(options: Mapping[str, object] | None) -> None:
    """Raise for options that PyTorch refuses. Warn of unknown names."""
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise ArgumentError(
            f"kernel_options must be a dict, but is a {type(options).__name__}. See "
            f"FlexKernelOptions."
        )
    for name in options:
        _check_name(name)
    if "BACKEND" not in options:
        return
    if options.get("FORCE_USE_FLEX_ATTENTION"):
        raise OptionError(
            "kernel_options must not have both BACKEND and FORCE_USE_FLEX_ATTENTION, which BACKEND "
            "replaces, but has both. Drop FORCE_USE_FLEX_ATTENTION."
        )
    if options["BACKEND"] not in get_args(KernelBackend):
        raise OptionError(
            f"kernel_options['BACKEND'] must be one of {', '.join(get_args(KernelBackend))}, but "
            f"is {options['BACKEND']!r}. Leave it out: it has no meaning on a CPU."
        )


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise OptionError(
            f"kernel_options must have strings as keys, but has {name!r}. See FlexKernelOptions."
        )
    plain = name[4:] if name.startswith(("fwd_", "bwd_")) else name
    if plain in OURS_TO_DECIDE:
        raise OptionError(
            f"kernel_options must not contain {name}, since return_aux decides which outputs are "
            f"written, but does. Use return_aux=AuxRequest(...)."
        )
    if plain not in KNOWN:
        close = difflib.get_close_matches(plain, KNOWN, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else " See FlexKernelOptions."
        warn(
            f"kernel_options has an unknown option {name!r}, which is ignored.{hint}",
            KernelOptionWarning,
        )

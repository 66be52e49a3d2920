"""The kernel options of PyTorch's flex_attention, which are checked and mostly ignored.

They tune Triton kernels on GPUs. On the CPU no option changes a result, so values are checked only
if PyTorch checks them. On other devices the options are passed to PyTorch. The names are those of
PyTorch's `FlexKernelOptions`; `fwd_` or `bwd_` before a name limits it to one of the two passes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

from torch.nn.attention import flex_attention as torch_flex

from quire.errors import ArgumentError, OptionError
from quire.support.warn import warn

FlexKernelOptions = torch_flex.FlexKernelOptions
KernelBackend: TypeAlias = Literal["AUTO", "TRITON", "FLASH", "TRITON_DECODE"]


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

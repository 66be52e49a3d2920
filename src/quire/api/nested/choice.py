"""Which backend computes nested attention, as `torch.nn.attention.sdpa_kernel` allows."""

from __future__ import annotations

from torch.backends import cuda as switches

from quire.config import Backend as BackendName
from quire.errors import BackendError

_FUSED, _MATH, _CUDNN = "flash_attention and efficient_attention", "math", "cudnn_attention"
_SWITCHED_OFF = "switched off by torch.nn.attention.sdpa_kernel or torch.backends.cuda"


def allowed_backend() -> BackendName:
    """Return "jit" if PyTorch allows fused kernels, "eager" if it allows math, "auto" for both."""
    fused = switches.flash_sdp_enabled() or switches.mem_efficient_sdp_enabled()
    if switches.math_sdp_enabled():
        return "auto" if fused else "eager"
    if not fused:
        raise no_backend(_SWITCHED_OFF)
    return "jit"


def no_backend(reason: str) -> BackendError:
    """Return PyTorch's error for a call that no backend can run. `reason` is why no kernel can."""
    reasons = {_FUSED: reason}
    if not switches.math_sdp_enabled():
        reasons[_MATH] = _SWITCHED_OFF
    reasons[_CUDNN] = "runs on CUDA only"
    lines = "".join(f"  {name}: {reason}.\n" for name, reason in reasons.items())
    return BackendError(
        f"No viable backend for scaled_dot_product_attention was found:\n{lines}Allow one of them "
        f"with sdpa_kernel, or change what the lines name."
    )


def told_by(error: BackendError) -> str:
    """Return the reasons that an error of ours lists, on one line."""
    lines = [line.strip(" .") for line in str(error).splitlines() if line.startswith("  ")]
    return ", ".join(lines)

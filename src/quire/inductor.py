"""PyTorch's own flex_attention, compiled by PyTorch: for devices other than the CPU.

Can be asked for on the CPU with backend="inductor"; there it has no backward pass and no lse.
"""

from __future__ import annotations

from quire.eager import Result
from quire.problem import Call


def obstacle(call: Call) -> str | None:
    """Why PyTorch cannot run `call`; None where it can."""
    raise NotImplementedError


def attention(call: Call) -> Result:
    """Hand `call` over to PyTorch."""
    raise NotImplementedError

"""Who computes a call: a table of backends, each of which says what it cannot do.

`auto` takes the first of the table that can. `explain` tells which that is and why not the others.
"""

from __future__ import annotations

from typing import Protocol

from quire import eager, inductor
from quire.config import Backend as BackendName
from quire.config import config
from quire.eager import Result
from quire.errors import ArgumentError, BackendError
from quire.problem import Call


class Backend(Protocol):
    """One way to compute attention."""

    def obstacle(self, call: Call) -> str | None:
        """Why this backend cannot run `call`; None where it can."""

    def run(self, call: Call) -> Result:
        """Compute."""


class Eager:
    """Tiles in torch ops."""

    def obstacle(self, call: Call) -> str | None:
        if call.query.device.type != "cpu":
            return f"the tensors are on {call.query.device}, and quire's own paths run on the CPU"
        return None

    def run(self, call: Call) -> Result:
        return eager.attention(call.problem, call.query, call.key, call.value, call.sink)


class Inductor:
    """PyTorch's own flex_attention, compiled by PyTorch."""

    def obstacle(self, call: Call) -> str | None:
        return inductor.obstacle(call)

    def run(self, call: Call) -> Result:
        return inductor.attention(call)


BACKENDS: dict[BackendName, Backend] = {"eager": Eager(), "inductor": Inductor()}
"""In the order in which `auto` tries them."""


def choose(name: BackendName, call: Call) -> Backend:
    """The backend called `name`, or for 'auto' the first that can run `call`."""
    if name not in ("auto", *BACKENDS):
        raise ArgumentError(
            f"backend must be one of auto, {', '.join(BACKENDS)}, but got {name!r}. Leave it out "
            f"to let quire choose."
        )
    if name == "auto":
        name = config().backend
    if name != "auto":
        reason = BACKENDS[name].obstacle(call)
        if reason is not None:
            raise BackendError(
                f"backend={name!r} cannot run this call: {reason}. Use backend='auto', or ask "
                f"quire.explain(...) what could."
            )
        return BACKENDS[name]
    for backend in BACKENDS.values():
        if backend.obstacle(call) is None:
            return backend
    raise BackendError(f"no backend can run this call.\n{explain_call(call)}")


def explain_call(call: Call, requested: BackendName = "auto") -> str:
    """Which backend would run `call`, and for each other one why it would not."""
    lines, chosen = [], None
    for name, backend in BACKENDS.items():
        reason = backend.obstacle(call)
        if reason is not None:
            lines.append(f"  {name}: cannot run this: {reason}.")
        elif chosen is None and requested in ("auto", name):
            chosen = name
            lines.append(f"  {name}: runs.")
        else:
            lines.append(f"  {name}: could run, but {chosen or requested} comes first.")
    head = f"backend={requested!r} takes {chosen or 'nothing'}:"
    return "\n".join([head, *lines])

"""The table of backends, and the choice between them.

    jit        kernels that quire compiles for the mods of a call
    eager      torch operations, tile by tile
    inductor   PyTorch's own flex_attention, compiled by PyTorch

`auto` takes the first backend of the table that can run a call. `explain_call` says which one that
is, and why the others are not used. A backend imports nothing from another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quire.backends import inductor, jit
from quire.codegen.llvm.target import Target
from quire.config import Backend as BackendName
from quire.config import config
from quire.errors import ArgumentError, BackendError
from quire.request import Call
from quire.runtime.work import flops_of


def _eager_obstacle(call: Call) -> str | None:
    device = call.placed.query.device
    if device.type != "cpu":
        return f"the tensors are on {device}, and quire's own paths run on the CPU"
    return None


OBSTACLES: dict[BackendName, Callable[[Call], str | None]] = {
    "jit": jit.obstacle,
    "eager": _eager_obstacle,
    "inductor": inductor.obstacle,
}
"""By backend: a function that returns why it cannot run a call, or None. `auto` tries in order."""


class Candidates(NamedTuple):
    """The user's choice in words, and the backends to try in order."""

    words: str
    names: tuple[BackendName, ...]


def choose(call: Call) -> BackendName:
    """Return the backend that the request names, or for 'auto' the first that can run the call."""
    candidates = _candidates(call.request.backend)
    reasons = []
    for name in candidates.names:
        reason = OBSTACLES[name](call)
        if reason is None:
            return name
        reasons.append(f"  {name}: {reason}.\n")
    raise BackendError(
        f"{candidates.words} cannot run this call:\n{''.join(reasons)}"
        f"Call quire.explain(...) to see what could, or change the call."
    )


def explain_call(call: Call) -> str:
    """Describe which backend would run `call`, what it costs, and why not the others."""
    candidates = _candidates(call.request.backend)
    obstacles = {name: obstacle(call) for name, obstacle in OBSTACLES.items()}
    able = [name for name in candidates.names if obstacles[name] is None]
    used = able[0] if able else None
    lines = [f"{candidates.words} uses {used or 'nothing: it raises a BackendError'}."]
    if used == "jit":
        lines.append(f"jit generates code for {Target.host()}.")
        lines.append(f"jit takes {flops_of(call)}.")
        unread = jit.computed_unread(call)
        if unread is not None:
            lines.append(f"jit computes {unread}.")
    for name, reason in obstacles.items():
        if reason is None:
            first = "comes first" if name in able else "was asked for"
            reason = f"{used or candidates.names[0]} {first}; it could run this call"
        if name != used:
            lines.append(f"{name} not used because {reason}.")
    return "\n".join(lines)


def _candidates(name: BackendName) -> Candidates:
    """Return the backends to try for `name`. QUIRE_BACKEND takes the place of 'auto'."""
    where, words, remedy = "backend", f"backend={name!r}", "Leave it out"
    if name == "auto" and config().backend != "auto":
        name = config().backend
        where, words, remedy = "QUIRE_BACKEND", f"QUIRE_BACKEND={name}", "Unset it"
    if name == "auto":
        return Candidates(words, tuple(OBSTACLES))
    if name not in OBSTACLES:
        known = ", ".join(["auto", *OBSTACLES])
        raise ArgumentError(
            f"{where} must be one of {known}, but is {name!r}. {remedy} to let quire choose."
        )
    return Candidates(words, (name,))

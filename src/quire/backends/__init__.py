"""Who computes a call: a table of backends, each of which says what it cannot do.

    jit        kernels that are generated for exactly this problem
    eager      tiles of torch ops
    inductor   PyTorch's own flex_attention, compiled by PyTorch

`auto` takes the first of the table that can. `explain_call` tells which that is and why not the
others. A backend imports nothing of another one.
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
"""Why each backend cannot compute a call, in the order in which `auto` tries them."""


class Candidates(NamedTuple):
    """What was asked for: in the user's words, and as the backends to try in order."""

    words: str
    names: tuple[BackendName, ...]


def choose(call: Call) -> BackendName:
    """The backend that the request names, or for 'auto' the first that can compute the call."""
    candidates = _candidates(call.request.backend)
    reasons = []
    for name in candidates.names:
        reason = OBSTACLES[name](call)
        if reason is None:
            return name
        reasons.append(f"  {name}: {reason}.\n")
    raise BackendError(
        f"{candidates.words} cannot run this call:\n{''.join(reasons)}"
        f"Ask quire.explain(...) what could, or change what stands in the way."
    )


def explain_call(call: Call) -> str:
    """Which backend would run `call`, what it cannot skip, and why the others would not."""
    candidates = _candidates(call.request.backend)
    obstacles = {name: obstacle(call) for name, obstacle in OBSTACLES.items()}
    able = [name for name in candidates.names if obstacles[name] is None]
    used = able[0] if able else None
    lines = [f"{candidates.words} uses {used or 'nothing: it raises a BackendError'}."]
    if used == "jit":
        lines.append(f"jit generates code for {Target.host()}.")
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
    """`name` with QUIRE_BACKEND in place of 'auto'."""
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

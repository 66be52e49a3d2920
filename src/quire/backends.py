"""Who computes a call: a table of backends, each of which says what it cannot do.

`auto` takes the first of the table that can. `explain_call` tells which that is and why not the
others.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from quire import compiled, eager, inductor
from quire.codegen.llvm.target import Target
from quire.config import Backend as BackendName
from quire.config import config
from quire.eager import Operands, Result
from quire.errors import ArgumentError, BackendError
from quire.one_by_one import one_by_one
from quire.problem import Call


class Backend(Protocol):
    """One way to compute attention."""

    def obstacle(self, call: Call) -> str | None:
        """Why this backend cannot run `call`; None where it can."""

    def run(self, call: Call) -> Result:
        """Compute. What `call.aux` does not ask for may be an empty tensor."""


class Jit:
    """A kernel that is generated for this very problem."""

    def obstacle(self, call: Call) -> str | None:
        """What cannot be generated, here or at all."""
        return compiled.obstacle(call)

    def run(self, call: Call) -> Result:
        """Compile what was not seen before, and run."""
        return compiled.attention(call)


class Eager:
    """Tiles in torch ops."""

    def obstacle(self, call: Call) -> str | None:
        """The CPU is all it asks for."""
        if call.query.device.type != "cpu":
            return f"the tensors are on {call.query.device}, and quire's own paths run on the CPU"
        return None

    def run(self, call: Call) -> Result:
        """Stripe by stripe."""
        return one_by_one(
            call.problem,
            Operands(call.query, call.key, call.value),
            call.packed,
            lambda problem, operands: eager.attention(
                problem, *operands, call.sink, wanted=call.aux
            ),
        )


class Inductor:
    """PyTorch's own flex_attention, compiled by PyTorch."""

    def obstacle(self, call: Call) -> str | None:
        """What PyTorch has no word for, or no kernel on this device."""
        return inductor.obstacle(call)

    def run(self, call: Call) -> Result:
        """Hand over."""
        return inductor.attention(call)


BACKENDS: dict[BackendName, Backend] = {
    "jit": Jit(),
    "eager": Eager(),
    "inductor": Inductor(),
}
"""In the order in which `auto` tries them."""


class Request(NamedTuple):
    """What was asked for: in the user's words, and as the backends to try in order."""

    words: str
    candidates: tuple[BackendName, ...]


def choose(name: BackendName, call: Call) -> Backend:
    """The backend called `name`, or for 'auto' the first that can run `call`."""
    request = _request(name)
    reasons = []
    for candidate in request.candidates:
        reason = BACKENDS[candidate].obstacle(call)
        if reason is None:
            return BACKENDS[candidate]
        reasons.append(f"  {candidate}: {reason}.\n")
    raise BackendError(
        f"{request.words} cannot run this call:\n{''.join(reasons)}"
        f"Ask quire.explain(...) what could, or change what stands in the way."
    )


def explain_call(call: Call, name: BackendName = "auto") -> str:
    """Which backend would run `call`, what it cannot skip, and why the others would not."""
    request = _request(name)
    obstacles = {each: backend.obstacle(call) for each, backend in BACKENDS.items()}
    able = [each for each in request.candidates if obstacles[each] is None]
    used = able[0] if able else None
    lines = [f"{request.words} uses {used or 'nothing: it raises a BackendError'}."]
    if used == "jit":
        lines.append(f"jit generates code for {Target.host()}.")
        unread = compiled.computed_unread(call)
        if unread is not None:
            lines.append(f"jit computes {unread}.")
    for each, reason in obstacles.items():
        if reason is None:
            first = "comes first" if each in able else "was asked for"
            reason = f"{used or request.candidates[0]} {first}; it could run this call"
        if each != used:
            lines.append(f"{each} not used because {reason}.")
    return "\n".join(lines)


def _request(name: BackendName) -> Request:
    """`name` with QUIRE_BACKEND in place of 'auto'."""
    where, words, remedy = "backend", f"backend={name!r}", "Leave it out"
    if name == "auto" and config().backend != "auto":
        name = config().backend
        where, words, remedy = "QUIRE_BACKEND", f"QUIRE_BACKEND={name}", "Unset it"
    if name == "auto":
        return Request(words, tuple(BACKENDS))
    if name not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ArgumentError(
            f"{where} must be one of {known}, but is {name!r}. {remedy} to let quire choose."
        )
    return Request(words, (name,))

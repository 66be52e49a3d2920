"""The plans that are known, by the keys of their calls."""

from __future__ import annotations

from quire.backends import choose
from quire.bounded import BoundedDict
from quire.plans.call_plan import CallPlan
from quire.plans.keys import Key, key_of, layout_of
from quire.request import Call, Request, call_of, check, check_mods

known: BoundedDict[Key, CallPlan] = BoundedDict(256)


def find(request: Request) -> tuple[CallPlan, Call]:
    """The plan for a request, one that is known or a new one, and the call that it computes.

    A request whose plan is known is like one that was checked, so it is not checked again.
    """
    layout = layout_of(request)
    if layout is None:
        check(request)
        return make(call_of(request))
    call = call_of(request)
    key = key_of(layout, call)
    plan = None if key is None else known.get(key)
    if plan is not None:
        return plan, call
    check(request)
    plan, call = make(call)
    if key is not None and key == key_of(layout, call):  # no other thread has edited its mask
        known.keep(key, plan)
    return plan, call


def make(call: Call) -> tuple[CallPlan, Call]:
    """A new plan, and the call with a seed for its dropout."""
    check_mods(call)
    backend = choose(call)  # which may refuse the call, before a random number is drawn
    call = call.seeded()
    return CallPlan(call, backend), call

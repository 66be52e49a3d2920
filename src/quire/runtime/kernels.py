"""Compiled code, by what it was compiled for: the core once per dtype, the mods once per graph.

For few queries there is also a core for each width of heads that many models have.
Both exist in two forms, for panels of queries and for single rows, as does what observes scores.

All are looked up in this process, then on disk, and only then compiled.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire.codegen.convention import (
    ENTRY,
    OBSERVE,
    Form,
    ForwardSpec,
)
from quire.codegen.kernels.backward import write_backward
from quire.codegen.kernels.decode import write_decode
from quire.codegen.kernels.forward import write_forward
from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.target import Target
from quire.codegen.mods.arguments import CaptureShape, ModArguments, is_literal
from quire.codegen.mods.derive import Derived, write_derive
from quire.codegen.mods.functions import (
    write_extent,
    write_rewrite,
    write_row_rewrite,
    write_verdict,
)
from quire.codegen.phases.observe import write_observe
from quire.codegen.phases.tiles import Tile
from quire.errors import CodegenError
from quire.ir.bound import Bounds
from quire.ir.differentiate import Derivatives, differentiate
from quire.ir.graph import Node, const, constants, inputs, text
from quire.ir.pyramid import Pyramid
from quire.runtime.cache import cache_key, object_cache


class ModRoots(NamedTuple):
    """The graphs of one problem, over one list of captured tensors.

    `always` is the mask that holds in full tiles too, `partial` holds in the others as well.
    `drop` is dropout as a graph that rewrites a weight, its input `score`. `bounds` are those of
    `always`, where no block mask says which tiles there are. `learned` are the captured tensors
    whose gradients are wanted, by their place in that list.
    """

    score: Node | None = None
    always: Node | None = None
    partial: Node | None = None
    drop: Node | None = None
    bounds: Bounds | None = None
    learned: tuple[int, ...] = ()

    @property
    def all(self) -> list[Node]:
        """Those that there are."""
        graphs = [self.score, self.always, self.partial, self.drop]
        bounds = [] if self.bounds is None else [self.bounds.can, self.bounds.must]
        return [root for root in (*graphs, *bounds) if root is not None]

    def everything(self, form: Form) -> list[Node]:
        """Those that a form needs."""
        if form != "backward" or self.score is None:
            return self.all
        slope, loads = self.slopes
        return [*self.all, *([] if slope is None else [slope]), *loads, *loads.values()]

    @property
    def judges_heads(self) -> bool:
        """Whether heads may skip other tiles than their neighbours."""
        return self.bounds is not None and _depends_on_head(self.bounds.can, self.bounds.must)

    @property
    def pyramids(self) -> tuple[Pyramid, ...]:
        """What the bounds load from besides the captured tensors."""
        return () if self.bounds is None else self.bounds.pyramids

    @property
    def masks(self) -> dict[str, list[Node]]:
        """The masks that hold where a function is used: in any tile, in full and partial ones."""
        always = [] if self.always is None else [self.always]
        both = always if self.partial is None else [*always, self.partial]
        return {"plain": [], "full": always, "partial": both}

    @property
    def slopes(self) -> Derivatives:
        """The derivatives of the score, for those loads alone that are from what is learned."""
        if self.score is None:
            return Derivatives(None, {})
        score, loads = derivatives(self.score)
        slope = const(0.0, self.score.dtype) if score is None else score
        return Derivatives(slope, {x: y for x, y in loads.items() if x.payload in self.learned})


@functools.lru_cache(maxsize=512)
def _depends_on_head(*roots: Node) -> bool:
    return "h" in inputs(*roots)


derivatives = functools.lru_cache(maxsize=512)(differentiate)

FUNCTIONS = ("plain", "full", "partial", "drop", "extent", "verdict")


class ModCode(NamedTuple):
    """The mods of a problem as machine code. A function without anything to do has address 0."""

    arguments: ModArguments
    code: jit.Code | None
    addresses: dict[str, int]


@dataclass(frozen=True, eq=False)
class Kernel:
    """The kernel of a form for some dtypes, and what follows from its shape."""

    form: Form
    spec: ForwardSpec
    tile: Tile
    code: jit.Code
    address: int


_WRITERS: dict[Form, Callable[[ForwardSpec], Module]] = {
    "panel": write_forward,
    "row": write_decode,
    "backward": write_backward,
}


COMMON_WIDTHS = {64, 96, 128}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kernel(
    form: Form,
    query: torch.dtype,
    key: torch.dtype,
    value: torch.dtype,
    out: torch.dtype,
    head_dim: int = 0,
    value_dim: int = 0,
) -> Kernel:
    """The kernel of a form for the dtypes of query, key, value and out.

    One for few queries is written for the width of its rows, if many models have that.
    """
    known = form == "row" and {head_dim, value_dim} <= COMMON_WIDTHS
    spec = ForwardSpec(
        Target.host(),
        *(_name(query), _name(key), _name(value), _name(out)),
        *((head_dim, value_dim) if known else (0, 0)),
    )
    return kernel_of(form, spec)


@functools.cache
def kernel_of(form: Form, spec: ForwardSpec) -> Kernel:
    """The kernel of a form, which is made once."""
    key = cache_key(form, repr(spec))
    code = code_of(key, spec.target, lambda: _WRITERS[form](spec), [ENTRY])
    return Kernel(form, spec, spec.tile, code, code.address(ENTRY))


@functools.cache
def observer(form: Form, tile: Tile) -> jit.Code:
    """The function that a kernel calls where an argmax or an entropy is wanted."""
    key = cache_key("observe", form, repr(tile))
    return code_of(key, tile.target, lambda: write_observe(form, tile), [OBSERVE.name])


def code_of(
    key: str, target: Target, write: Callable[[], Module], exports: Sequence[str]
) -> jit.Code:
    """Code from the disk cache, or of the module that `write` gives, which is then kept there."""
    cache = object_cache()
    image = cache.get(key)
    if image is not None:
        with contextlib.suppress(CodegenError):  # it does not load: another takes its place
            return jit.load(image, exports)
    image = jit.compile_object(write().text, target)
    code = jit.load(image, exports)
    cache.put(key, image)
    return code


@functools.lru_cache(maxsize=512)
def mod_code(form: Form, tile: Tile, roots: ModRoots, shapes: tuple[CaptureShape, ...]) -> ModCode:
    """The mods of a problem, looked up by the very nodes.

    The same mod gives the same nodes for as long as this cache holds on to them, and graphs that
    differ in their constants alone share their code.
    """
    graphs = roots.everything(form)
    arguments = ModArguments.of(graphs, shapes)
    names = _written(form, roots)
    if not names:
        return ModCode(arguments, None, dict.fromkeys(FUNCTIONS, 0))
    literals = [node.payload for node in constants(*graphs) if is_literal(node)]
    content = "\n".join(
        [
            form,
            repr(tile),
            repr(shapes),
            repr(names),
            repr(literals),
            repr(roots.learned),
            text(*graphs, values=False),
        ]
    )
    code = _codes.get(content)
    if code is None:
        key = cache_key("mods", content)
        code = _codes[content] = code_of(
            key, tile.target, lambda: write_mods(form, tile, roots, arguments), names
        )
    written = {name: _written_as(form, roots, name) for name in FUNCTIONS}
    addresses = {name: code.address(same) if same else 0 for name, same in written.items()}
    return ModCode(arguments, code, addresses)


_codes: weakref.WeakValueDictionary[str, jit.Code] = weakref.WeakValueDictionary()


def _written_as(form: Form, roots: ModRoots, function: str) -> str | None:
    """Which function is written for `function`: itself, an equal one, or none."""
    if function == "drop":
        return "drop" if roots.drop is not None and form != "backward" else None
    if function == "verdict":
        return "verdict" if roots.bounds is not None else None
    if function == "extent":
        return "extent" if form != "row" and roots.masks["partial"] else None
    masks = roots.masks
    if roots.score is None and not masks[function] and form != "backward":
        return None
    return next(name for name in ("plain", "full", "partial") if masks[name] == masks[function])


def _written(form: Form, roots: ModRoots) -> list[str]:
    return [name for name in FUNCTIONS if _written_as(form, roots, name) == name]


def write_mods(form: Form, tile: Tile, roots: ModRoots, arguments: ModArguments) -> Module:
    """The module of all the functions that a problem needs."""
    module = Module()
    write = write_row_rewrite if form == "row" else write_rewrite
    for name in _written(form, roots):
        if name == "drop":
            write(module, name, tile, arguments, roots.drop, [], unit=1.0)
        elif name == "extent":
            write_extent(module, name, tile, arguments, roots.masks["partial"])
        elif name == "verdict":
            assert roots.bounds is not None
            write_verdict(module, name, tile, arguments, roots.bounds.can, roots.bounds.must)
        elif form == "backward":
            slope, loads = roots.slopes
            masks = tuple(roots.masks[name])
            derived = Derived(roots.score, slope, tuple(loads.items()), masks, roots.drop)
            write_derive(module, name, tile, arguments, derived)
        else:
            write(module, name, tile, arguments, roots.score, roots.masks[name])
    return module

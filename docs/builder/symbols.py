"""The public names of quire, each with its home, its text and its example."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import types
from dataclasses import dataclass
from typing import Any

from builder import source
from builder.examples import examples

MODULES = """
    quire quire.mods quire.mods.attention_gym quire.weights quire.kv quire.linear
    quire.distributed quire.engine quire.engine.speculation
    quire.serve quire.draw.pages quire.integrations.transformers
"""
"""The modules whose `__all__` is public."""


@dataclass(frozen=True)
class Symbol:
    """A public name: `quire.mods.causal` is found as `causal` of `quire.mods`."""

    name: str
    value: Any
    home: str | None  # the module of quire that defines it

    @property
    def short(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def module(self) -> str:
        """The public module that has it."""
        return self.name.rpartition(".")[0]

    @property
    def is_class(self) -> bool:
        """Whether it is a class."""
        return inspect.isclass(self.value)

    @property
    def page(self) -> str:
        """The name of its page. `plan` and `Plan` must differ where case does not count."""
        return f"{self.name}-class" if self.is_class else self.name

    @property
    def doc(self) -> str:
        """Its docstring, or the text below the line that defines it."""
        module = source.modules().get(self.home or "")
        if module and self.short in module.stated:
            return inspect.cleandoc(module.stated[self.short])
        own = self.home is not None and not isinstance(self.value, str)
        text = inspect.getdoc(self.value) or "" if own else ""
        return text or STATED.get(self.name, "")

    @property
    def summary(self) -> str:
        """The first sentence."""
        first = " ".join(self.doc.split("\n\n")[0].split())
        return re.split(r"(?<=[.:]) ", first)[0].rstrip(":")

    @property
    def example(self) -> str:
        """A program that uses it; tests run it."""
        names = (self.name, *(each.name for each in same_thing(self)))
        return next((found for name in names if (found := examples().get(name))), "")


STATED = {
    "quire.__version__": "The version of quire, as in its package.",
    "quire.FlexKernelOptions": (
        "PyTorch's TypedDict of `kernel_options`. quire takes the same names and checks their "
        "values. Options that only tune a GPU kernel change nothing."
    ),
    "quire.integrations.transformers.NAME": (
        'The name of this implementation of attention: `attn_implementation="quire"`.'
    ),
    "quire.linear.Weights": "The formats of packed weights, by name.",
}
"""Texts of names that can have no docstring."""

TORCH = {
    "quire.AuxOutput": "torch.nn.attention.flex_attention.AuxOutput",
    "quire.AuxRequest": "torch.nn.attention.flex_attention.AuxRequest",
    "quire.BlockMask": "torch.nn.attention.flex_attention.BlockMask",
    "quire.FlexKernelOptions": "torch.nn.attention.flex_attention.FlexKernelOptions",
    "quire.PagedAttention": "torch.nn.attention.experimental._paged_attention.PagedAttention",
    "quire.and_masks": "torch.nn.attention.flex_attention.and_masks",
    "quire.attention": "torch.nn.functional.scaled_dot_product_attention",
    "quire.create_block_mask": "torch.nn.attention.flex_attention.create_block_mask",
    "quire.create_mask": "torch.nn.attention.flex_attention.create_mask",
    "quire.flex_attention": "torch.nn.attention.flex_attention.flex_attention",
    "quire.jagged_scaled_dot_product_attention": (
        "torch.nested._internal.sdpa.jagged_scaled_dot_product_attention"
    ),
    "quire.noop_mask": "torch.nn.attention.flex_attention.noop_mask",
    "quire.or_masks": "torch.nn.attention.flex_attention.or_masks",
    "quire.varlen_attn": "torch.nn.attention.varlen.varlen_attn",
    "quire.distributed.context_parallel": (
        "torch.distributed.tensor.experimental.context_parallel"
    ),
    "quire.linear.PackedLinear": "torch.nn.Linear",
    "quire.linear.PackedEmbedding": "torch.nn.Embedding",
    "quire.linear.matmul": "torch.nn.functional.linear",
}
"""The names of PyTorch that names of quire take the place of."""


@functools.cache
def public_modules() -> dict[str, types.ModuleType]:
    """Return the public modules by the name under which users import them."""
    found = {}
    for name in MODULES.split():
        parent, _, last = name.rpartition(".")
        known = parent and getattr(importlib.import_module(parent), last, None)
        found[name] = known if inspect.ismodule(known) else importlib.import_module(name)
    return found


@functools.cache
def symbols() -> dict[str, Symbol]:
    """Return all public names that are no modules; a name that two modules have is in both."""
    return {
        f"{module}.{name}": Symbol(f"{module}.{name}", value, home_of(content, name, value))
        for module, content in public_modules().items()
        for name in content.__all__
        if not inspect.ismodule(value := getattr(content, name))
    }


def home_of(module: types.ModuleType, name: str, value: Any) -> str | None:
    """Return the module of quire that defines a name."""
    stated = getattr(value, "__module__", None)
    if isinstance(stated, str) and stated.startswith("quire"):
        return stated
    here = module.__name__
    for _ in range(8):  # a constant or an alias: follow the imports
        target = source.modules()[here].imports.get(name)
        if target is None or (source.module_of(target) or here) == here:
            return here
        here = source.module_of(target) or here
    return here


def same_thing(symbol: Symbol) -> list[Symbol]:
    """Return the other public names of the same object."""
    return [
        each
        for each in symbols().values()
        if each.value is symbol.value and each.name != symbol.name and symbol.home == each.home
    ]


def related(symbol: Symbol) -> list[Symbol]:
    """Return up to ten other public names, the nearest first.

    First come those that its text names, then those of its file, those that its example uses,
    those whose text names it, and those of its public module.
    """
    every = symbols().values()
    quoted, used = words(symbol), set(re.findall(r"\w+", imported(symbol.example)))
    by_text = [each for each in every if each.short in quoted]
    beside = [each for each in every if each.home == symbol.home]
    by_example = [each for each in every if each.short in used]
    back = [each for each in every if symbol.short in words(each)]
    module = [each for each in every if each.module == symbol.module][:5]
    found: dict[str, Symbol] = {}
    for each in (*by_text, *beside, *by_example, *back, *module):
        if each.value is not symbol.value and each.short not in {s.short for s in found.values()}:
            found[each.name] = each
    return list(found.values())[:10]


@functools.cache
def words(symbol: Symbol) -> frozenset[str]:
    """Return the words that a text has in backquotes."""
    return frozenset(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", symbol.doc))))


def imported(program: str) -> str:
    """Return the names that a program takes from quire."""
    names = re.findall(r"^from quire[\w.]* import (.+)$|\bquire\.(\w+)\(", program, re.MULTILINE)
    return " ".join(name for pair in names for name in pair)

"""A call as text: everything that `quire::attention` needs besides tensors and numbers.

    Form(memory="dense", mods={"score_mod": WrittenMod("bias", rows, captures)}, ...)

An operator in a graph of PyTorch takes tensors, numbers and strings. So a mod is written as its
graph, and the tensors that it captured become operands. `read` takes text from anywhere, such as
the file of an exported program: it checks every field and runs nothing that the text names.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from quire.aux_outputs import OF_KERNELS, AuxRequest
from quire.config import Backend as BackendName
from quire.errors import ArgumentError, DtypeError
from quire.ir.graph import Node
from quire.ir.portable import DTYPE_NAMES, dtype_name, portable, restore
from quire.ir.trace import INPUTS, Kind, Traced, call_name
from quire.mods.weights import Weighting

VERSION = 2
"""Part of every text. torch.compile keeps compiled graphs on disk under a key with this text in it.

So it must change when the operators take other arguments or lay out results in another way.
"""
MEMORIES = ("dense", "ragged", "paged")
MODS: dict[str, Kind] = {
    "score_mod": "score",
    "mask_mod": "mask",
    "prob_mod": "score",
    "partial_mod": "mask",
}
"""The mods of a call in the order of their captured tensors, and their kinds."""

TABLES = (
    "offsets",
    "lengths",
    "page_table",
    "first_page",
    "key_scale",
    "value_scale",
    "q_start",
    "q_offsets",
    "q_lengths",
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "seed",
)
"""The names of tensors that have no gradient."""

NUMBERS = ("start", "q_start", "mask_q_len", "mask_kv_len")
"""The names of numbers that may differ from call to call."""


class CapturedTensor(NamedTuple):
    """What a graph relies on: the dtype of a captured tensor, and its number of dimensions."""

    dtype: torch.dtype
    rank: int

    def dim(self) -> int:
        """Return the number of dimensions, as a tensor does."""
        return self.rank


class WrittenMod(NamedTuple):
    """The graph of a mod, and what it relies on in each tensor that it captured."""

    name: str
    output: Node
    captures: tuple[CapturedTensor, ...]

    @staticmethod
    def of(mod: Traced) -> WrittenMod:
        """Return what can be written of a mod."""
        captures = tuple(CapturedTensor(x.dtype, x.dim()) for x in mod.captures)
        return WrittenMod(mod.name, mod.output, captures)

    def on(self, captures: tuple[Tensor, ...], kind: Kind) -> Traced:
        """Return the mod with these captured tensors."""
        if not captures and not self.captures:
            return _without_captures(self.output, kind, self.name)
        for tensor, expected in zip(captures, self.captures, strict=True):
            if tensor.dtype != expected.dtype or tensor.dim() != expected.rank:
                raise DtypeError(
                    f"a captured tensor of {self.name!r} must be {dtype_name(expected.dtype)} with "
                    f"{expected.rank} dimensions, as when the graph was made, but is "
                    f"{dtype_name(tensor.dtype)} {list(tensor.shape)}. Make the graph again."
                )
        return Traced(self.output, captures, kind, self.name)


@functools.lru_cache(maxsize=1024)
def _without_captures(output: Node, kind: Kind, name: str) -> Traced:
    return Traced(output, (), kind, name)


class Form(NamedTuple):
    """A request without its tensors and numbers. `tables` and `numbers` name what is given."""

    memory: str
    tables: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    mods: Mapping[str, WrittenMod] = {}
    sink: bool = False
    learns: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    aux: AuxRequest = AuxRequest()
    block_size: tuple[int, int] | None = None
    backend: BackendName = "auto"
    weighting: Weighting = "softmax"

    @property
    def others(self) -> tuple[str, ...]:
        """Return the names of the results besides the output, in their order."""
        if not any(self.aux):
            return ("lse",) if self.learns else ()
        wanted = self.aux._replace(lse=self.aux.lse or self.learns)
        return tuple(name for name, asked in wanted._asdict().items() if asked)

    def __str__(self) -> str:
        """Return a short name for profilers: `attention(alibi, causal)`."""
        return call_name(*(mod.name for mod in self.mods.values()))


def write(form: Form) -> str:
    """Return a form as text. Equal forms give equal text."""
    plain = form._asdict() | {
        "version": VERSION,
        "aux": [name for name, wanted in form.aux._asdict().items() if wanted],
        "scale": None if form.scale is None else float(form.scale).hex(),
        "mods": {
            field: {
                "name": mod.name,
                "graph": portable(mod.output),
                "captures": [[dtype_name(dtype), rank] for dtype, rank in mod.captures],
            }
            for field, mod in form.mods.items()
        },
    }
    return json.dumps(plain, separators=(",", ":"))


@functools.lru_cache(maxsize=1024)
def read(text: str) -> Form:
    """Return the form that `write` wrote. Raise an ArgumentError for any other text."""
    try:
        return _form(json.loads(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArgumentError(
            f"the text of quire::attention must be one that this version of quire wrote, but it "
            f"is not: {error}. Export the program again."
        ) from error


def _form(plain: Any) -> Form:
    _expect(isinstance(plain, dict) and plain.pop("version", None) == VERSION, "another version")
    _expect(plain.keys() == set(Form._fields), "other fields")
    memory, backend, scale = plain["memory"], plain["backend"], plain["scale"]
    _expect(memory in MEMORIES, "an unknown memory")
    _expect(plain["weighting"] in get_args(Weighting), "an unknown weighting")
    _expect(backend in ("auto", "jit", "eager"), "an unknown backend")
    for name, known in (("tables", TABLES), ("numbers", NUMBERS), ("aux", OF_KERNELS)):
        _expect(isinstance(plain[name], list) and set(plain[name]) <= set(known), f"other {name}")
    size = plain["block_size"]
    valid = size is None or (len(size) == 2 and all(type(n) is int and n > 0 for n in size))
    _expect(valid, "no block size")
    _expect(type(plain["sink"]) is bool and type(plain["learns"]) is bool, "no truth value")
    mods = plain["mods"]
    _expect(isinstance(mods, dict) and set(mods) <= set(MODS), "other mods")
    return Form(
        memory=memory,
        tables=tuple(plain["tables"]),
        numbers=tuple(plain["numbers"]),
        mods={field: _mod(mods[field], kind) for field, kind in MODS.items() if field in mods},
        sink=plain["sink"],
        learns=plain["learns"],
        scale=None if scale is None else float.fromhex(scale),
        dropout_p=float(plain["dropout_p"]),
        aux=AuxRequest(*(name in plain["aux"] for name in OF_KERNELS)),  # type: ignore[arg-type]
        block_size=None if size is None else (size[0], size[1]),
        backend=backend,
        weighting=plain["weighting"],
    )


def _mod(plain: Any, kind: Kind) -> WrittenMod:
    _expect(isinstance(plain, dict) and isinstance(plain["name"], str), "a mod without a name")
    captures = tuple(_captured(*entry) for entry in plain["captures"])
    return WrittenMod(plain["name"], restore(plain["graph"], captures, INPUTS[kind]), captures)


def _captured(name: object, rank: object) -> CapturedTensor:
    _expect(isinstance(name, str) and name in DTYPE_NAMES, "an unknown dtype")
    _expect(type(rank) is int and 0 <= rank < 64, "no number of dimensions")
    assert isinstance(name, str) and isinstance(rank, int)
    return CapturedTensor(DTYPE_NAMES[name], rank)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(f"it has {otherwise}")

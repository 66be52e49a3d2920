"""Mistakes that a QuireError must refuse: tensors without memory, odd dtypes, odd paths."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quire
from quire import BlockMask, Dense, Paged, Ragged
from quire.errors import (
    ArgumentError,
    MaskFileError,
    MissingFileError,
    SequenceFileError,
    TensorKindError,
    UnsupportedOpError,
)
from quire.kv import PagedKVCache
from quire.mods import causal

HEADS, DIM, PAGE = 4, 16, 16
TABLE = [[0, 1], [2, 3]]


def query(rows: int = 1) -> Tensor:
    return torch.randn(2, HEADS, rows, DIM)


def keys() -> Tensor:
    return torch.randn(2, HEADS, 6, DIM)


def pages() -> Tensor:
    return torch.randn(4, HEADS, PAGE, DIM)


def emptied(tensor: Tensor, left: int = 0) -> Tensor:
    """Shrink the storage of a tensor to `left` bytes, and return the tensor."""
    tensor.untyped_storage().resize_(left)
    return tensor


def biased(bias: Tensor) -> Callable[..., Any]:
    return lambda score, b, h, q_idx, kv_idx: score + bias[h]


WITHOUT_MEMORY: dict[str, tuple[str, Callable[[], object]]] = {
    "query": ("query", lambda: quire.attention(emptied(query()), Dense(keys(), keys()))),
    "key": ("key", lambda: quire.attention(query(), Dense(emptied(keys()), keys()))),
    "value": ("value", lambda: quire.attention(query(), Dense(keys(), emptied(keys())))),
    "a part of the key": (
        "key",
        lambda: quire.attention(query(), Dense(emptied(keys(), 1000), keys())),
    ),
    "a slice that begins behind": (
        "key",
        lambda: quire.attention(query(), Dense(emptied(keys()[:, :, 2:]), keys()[:, :, 2:])),
    ),
    "packed": (
        "value",
        lambda: quire.attention(
            torch.randn(6, HEADS, DIM),
            Ragged(torch.randn(6, HEADS, DIM), emptied(torch.randn(6, HEADS, DIM)), [0, 6]),
        ),
    ),
    "pages": (
        "key",
        lambda: quire.attention(
            query(), Paged(emptied(pages()), pages(), torch.tensor(TABLE), [20, 20])
        ),
    ),
    "page table": (
        "page_table",
        lambda: quire.attention(
            query(), Paged(pages(), pages(), emptied(torch.tensor(TABLE)), [20, 20])
        ),
    ),
    "lengths": (
        "lengths",
        lambda: quire.attention(
            query(),
            Paged(pages(), pages(), torch.tensor(TABLE), emptied(torch.tensor([20, 20]))),
        ),
    ),
    "sink": (
        "sink",
        lambda: quire.attention(query(), Dense(keys(), keys()), sink=emptied(torch.zeros(HEADS))),
    ),
    "scale": (
        "scale",
        lambda: quire.attention(query(), Dense(keys(), keys()), scale=emptied(torch.ones(1))),
    ),
    "captured": (
        "a captured tensor",
        lambda: quire.attention(
            query(), Dense(keys(), keys()), score_mod=biased(emptied(torch.zeros(HEADS)))
        ),
    ),
}


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_a_tensor_whose_memory_was_taken_away(name: str) -> None:
    at_fault, call = WITHOUT_MEMORY[name]
    with pytest.raises(
        TensorKindError,
        match=rf"^{at_fault} must have its memory, \d+ bytes for shape .*, but its storage was "
        r"resized to \d+\. Gather it, or resize the storage back, before the call\.$",
    ):
        call()


@pytest.mark.parametrize("place", range(3))
def test_it_is_taken_away_after_calls_that_went_well(place: int) -> None:
    operands = [query(), keys(), keys()]
    for _ in range(3):
        quire.attention(operands[0], Dense(*operands[1:]), mask=causal)
    emptied(operands[place])
    with pytest.raises(TensorKindError, match="must have its memory"):
        quire.attention(operands[0], Dense(*operands[1:]), mask=causal)


def test_what_a_mod_loads_from_is_taken_away_after_calls_that_went_well() -> None:
    bias = torch.zeros(HEADS)
    mod, operands = biased(bias), (query(), Dense(keys(), keys()))
    step = quire.plan(*operands, score_mod=mod)
    for _ in range(3):
        quire.attention(*operands, score_mod=mod)
        step(*operands)
    emptied(bias)
    with pytest.raises(TensorKindError, match="a captured tensor must have its memory"):
        quire.attention(*operands, score_mod=mod)
    with pytest.raises(TensorKindError, match="a captured tensor must have its memory"):
        step(*operands)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("times", [1, 3])  # the first call of its kind, and one that is recalled
def test_it_is_taken_away_between_forward_and_backward(place: int, times: int) -> None:
    operands = [tensor.requires_grad_() for tensor in (query(9), keys(), keys())]
    for _ in range(times):
        out = quire.attention(operands[0], Dense(*operands[1:]), mask=causal)
    emptied(operands[place])
    with pytest.raises(TensorKindError, match="must have its memory"):
        out.sum().backward()


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64]
)
def test_a_page_table_of_any_integers(dtype: torch.dtype) -> None:
    operands = (query(), pages(), pages())
    table = torch.tensor(TABLE)
    wanted = quire.attention(operands[0], Paged(*operands[1:], table, [20, 20]), mask=causal)
    memory = Paged(*operands[1:], table.to(dtype), [20, 20])
    assert torch.equal(quire.attention(operands[0], memory, mask=causal), wanted)
    memory = Paged(*operands[1:], (table + 9).to(dtype), [20, 20])
    with pytest.raises(ArgumentError, match=r"page_table\[0, 0\] must be one of the 4 pages"):
        quire.attention(operands[0], memory, mask=causal)


@pytest.mark.parametrize("rows", [1, 9])
def test_no_page_table(rows: int) -> None:
    memory = Paged(pages(), pages(), None, [20, 20])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"page_table must be a tensor or a sequence of integ"):
        quire.attention(query(rows), memory)


@pytest.mark.filterwarnings("ignore::quire.EagerModWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("kind", ["float8", "csr", "coo"])
def test_captured_tensors_that_nobody_can_index(kind: str, backend: Any) -> None:
    table = {
        "float8": lambda: torch.zeros(6, 6).to(torch.float8_e4m3fn),
        "csr": lambda: torch.eye(6).to_sparse_csr(),
        "coo": lambda: torch.eye(6).to_sparse(),
    }[kind]()

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[q_idx, kv_idx]

    with pytest.raises(
        UnsupportedOpError,
        match=r"score_mod 'mod' must be made of operations that quire can trace or torch.vmap can "
        r"run, but neither can: .*Convert the tensors that it reads to dense ones of an ordinary "
        r"dtype",
    ):
        quire.attention(query(), Dense(keys(), keys()), score_mod=mod, backend=backend)


@pytest.mark.parametrize("scale", [10**400, -(10**400), torch.tensor(1.0, device="meta")])
def test_a_scale_that_no_float_is(scale: Any) -> None:
    with pytest.raises(ArgumentError, match=r"scale must be a finite number, but is .* Leave it"):
        quire.attention(query(), Dense(keys(), keys()), scale=scale)


def cache() -> PagedKVCache:
    return PagedKVCache(layers=1, heads=1, head_dim=8, page_size=4, n_pages=4)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none"
    name = re.escape(repr(str(path)))
    but = f"but there is no file {name}. Give the path that the mask"
    with pytest.raises(MissingFileError, match=f"BlockMask.save has written, {but}"):
        BlockMask.load(path)
    got = f"but there is none at {name}. Give the path that the sequence"
    with pytest.raises(MissingFileError, match=f"PagedKVCache.save has written, {got}"):
        cache().load(path)


@pytest.mark.parametrize("path", [None, 3, "a\0b", "a directory"])
def test_paths_that_are_none(path: Any, tmp_path: Path) -> None:
    if path == "a directory":
        path = tmp_path
    mask, holder = BlockMask.from_lengths([3]), cache()
    sequence = holder.sequence()
    readable = (r"path must be a file that .*, but .*'", r"path must be a file that .*, but .*'")
    writable = (
        r"path must be where a file can be written, but '",
        r"path must be a place for a file, but '.*' cannot be written",
    )
    calls = (
        (MaskFileError, BlockMask.load, mask.save),
        (SequenceFileError, holder.load, lambda path: holder.save(sequence, path)),
    )
    for (error, load, save), to_read, to_write in zip(calls, readable, writable, strict=True):
        # A C library may cut a path at its null, and find no file under what is left.
        with pytest.raises((error, MissingFileError), match=to_read):
            load(path)
        with pytest.raises(error, match=to_write):
            save(path)


# --- ways to differentiate that there are not ----------------------------------------------------


def attended(query: Tensor) -> Tensor:
    memory = Dense(torch.ones(2, HEADS, 6, DIM), torch.ones(2, HEADS, 6, DIM))
    return quire.attention(query, memory, mask=causal)


def with_bias(bias: Tensor) -> Tensor:
    memory = Dense(torch.ones(2, HEADS, 6, DIM), torch.ones(2, HEADS, 6, DIM))
    return quire.attention(torch.ones(2, HEADS, 1, DIM), memory, score_mod=biased(bias))


def batched_grads(times: int) -> None:
    given = query().requires_grad_()
    for _ in range(times):
        out = attended(given)
    torch.autograd.grad(out, given, torch.ones(3, *out.shape), is_grads_batched=True)


MANY = r"^the backward pass takes one gradient .* Use torch.func.jacrev or torch.func.vmap of "
jacobian = torch.autograd.functional.jacobian


@pytest.mark.parametrize(
    ("message", "call"),
    [
        pytest.param(MANY, lambda: batched_grads(1), id="is_grads_batched"),
        pytest.param(MANY, lambda: batched_grads(3), id="is_grads_batched of a recalled call"),
        pytest.param(MANY, lambda: jacobian(attended, query(), vectorize=True), id="vectorize"),
    ],
)
# Of torch's own vmap; with Python 3.14 in other words.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is (deprecated|not supported)")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_ways_to_differentiate_that_there_are_not(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(TensorKindError, match=message):
        call()


def test_what_they_advise_works() -> None:
    given = query()
    wanted = jacobian(attended, given)
    assert torch.equal(torch.func.jacrev(attended)(given), wanted)
    _, pushed = torch.autograd.functional.jvp(attended, given, torch.ones_like(given))
    torch.testing.assert_close(pushed, wanted.sum((-1, -2, -3, -4)))


def test_a_package_that_is_not_there() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import quire\n"
        "try:\n"
        "    import quire.integrations.transformers\n"
        "except quire.errors.MissingPackageError as error:\n"
        "    print(isinstance(error, ImportError), error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        "True the package transformers must be installed, but importing it raises"
    )
    assert done.stdout.strip().endswith("Install it: pip install 'quire[models]'.")

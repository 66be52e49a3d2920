"""New rows of keys and values, copied to their slots in pages and converted on the way.

    slot    page * page_size + the row in it
    rows    [tokens, heads, width], any strides but the last
    pages   [pages, heads, page_size, width]

One call writes the keys and the values of a layer. Threads take BLOCK tokens at a time.
"""

from __future__ import annotations

from quire.codegen.builder import Function, Module, Value
from quire.codegen.staging import Storage, storage
from quire.codegen.target import Target
from quire.codegen.types import F32, F64, I64, PTR, Layout, Type

NAME = "append"
BLOCK = 16  # tokens

_SIDE: dict[str, Type] = {
    "source": PTR,
    "into": PTR,
    "token_stride": I64,
    "head_stride": I64,
    "width": I64,
}
SIDES = ("key", "value")
APPEND = Layout(
    "append",
    {
        "next": I64,  # the token that the next thread begins with
        "tokens": I64,
        "heads": I64,
        "page_size": I64,
        "slots": PTR,
        **{f"{side}_{name}": type for side in SIDES for name, type in _SIDE.items()},
    },
)


def write_append(target: Target, source: str, pages: str) -> Module:
    """A kernel over APPEND, for rows of one dtype and pages of another, by torch's names."""
    module, kinds = Module(), (storage(source), storage(pages))
    with module.function(NAME, {"argument": PTR}) as f:
        (argument,) = f.parameters
        tokens = f.field(APPEND, argument, "tokens")
        counter = f.offset(argument, APPEND.index("next"), I64)
        with f.forever() as leave:
            begin = f.atomic_add(counter, BLOCK)
            leave(begin >= tokens)
            end = f.minimum(begin + BLOCK, tokens)
            for side in SIDES:
                _copy_tokens(f, target, kinds, argument, side, begin, end)
    return module


def _copy_tokens(
    f: Function,
    target: Target,
    kinds: tuple[Storage, Storage],
    argument: Value,
    side: str,
    begin: Value,
    end: Value,
) -> None:
    heads, page_size, slots = (
        f.field(APPEND, argument, name) for name in ("heads", "page_size", "slots")
    )
    source, into, token_stride, head_stride, width = (
        f.field(APPEND, argument, f"{side}_{name}") for name in _SIDE
    )
    page_width = page_size * width  # of one head
    with f.range(begin, end) as token:
        slot = f.load(I64, slots, token)
        page = slot.udiv(page_size)
        row = page * (page_width * heads) + (slot - page * page_size) * width
        with f.range(0, heads) as head:
            read = f.offset(source, token * token_stride + head * head_stride, kinds[0].memory)
            write = f.offset(into, row + head * page_width, kinds[1].memory)
            _copy_row(f, target, kinds, read, write, width)


def _copy_row(
    f: Function,
    target: Target,
    kinds: tuple[Storage, Storage],
    read: Value,
    write: Value,
    width: Value,
) -> None:
    """One head of one token: whole vectors, then what is left."""
    source, pages = kinds
    # Torch converts between double and the narrow dtypes by way of float, too.
    element = F64 if pages.memory == F64 else F32
    lanes = target.lanes(source.memory.as_int if source == pages else element)

    def copy(column: Value, count: int) -> None:
        if source == pages:  # as bits, so that NaNs stay the very ones
            bits = source.memory.as_int.vector(count)
            f.store(f.load(bits, read, column), write, column)
            return
        number = source.read(f, f.load(source.memory.vector(count), read, column), F32)
        f.store(pages.write(f, f.convert(number, element)), write, column)

    whole = width & -lanes
    with f.range(0, whole, lanes) as column:
        copy(column, lanes)
    with f.range(whole, width) as column:
        copy(column, 0)

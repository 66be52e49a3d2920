"""The lines of one function, and loops and branches around them.

`range`, `when` and `forever` are `with` blocks. Where values flow around a loop or out of a branch,
`loop`, `repeat` and `choose` take functions, and return what those returned:

    total, = f.loop(0, n, lambda i, carried: [carried[0] + f.load(F32, x, i)], carry=[zero])

A value that is made inside a block lives until the block ends. Using it later raises an error here,
before LLVM sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from quire.codegen.llvm.types import I1, I64, VOID, Type, literal
from quire.codegen.llvm.values import Operand, Signature, Value
from quire.errors import CodegenError


class _Loop(NamedTuple):
    """A loop while it is written: its label, and the values that are carried around."""

    label: str
    before: str
    phi_line: int
    first: list[Value]
    carried: list[Value]


class Blocks:
    """The text of one function while it is written."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self._lines: list[str] = ["entry:"]
        self._block = "entry"
        self._scopes: list[int] = [0]
        self._count = 0
        self.given = {
            name: Value(self, type, f"%{name}", 0) for name, type in signature.parameters.items()
        }
        self.parameters = list(self.given.values())

    # --- lines

    def emit(self, text: str, type: Type, *used: Value) -> Value:
        """Append an instruction with a result. `used` are its operands, which must be live here."""
        self._check(used)
        self._count += 1
        name = f"%v{self._count}"
        self._lines.append(f"  {name} = {text}")
        return Value(self, type, name, self._scopes[-1])

    def emit_void(self, text: str, *used: Value) -> None:
        """Append an instruction without a result."""
        self._check(used)
        self._lines.append(f"  {text}")

    def comment(self, text: str) -> None:
        """Append a comment for readers of the generated text."""
        self._lines.append(f"  ; {text}")

    def value(self, operand: Operand, type: Type) -> Value:
        """`operand` as a value of exactly `type`; Python numbers become constants."""
        if not isinstance(operand, Value):
            return Value(self, type, literal(type, operand), 0)
        if operand.type != type:
            raise CodegenError(f"expected {type}, got {operand!r}; convert or splat it first")
        return operand

    def give_back(self, value: Value) -> None:
        """Return a value from the function, and end it."""
        if len(self._scopes) != 1:
            raise CodegenError("expected to return at the end of the function, got a nested block")
        self.value(value, self.signature.returns)
        self.emit_void(f"ret {value!r}", value)
        self._scopes.clear()

    def finish(self) -> str:
        """The text of the body; nothing can be added after."""
        if self._scopes:
            if self.signature.returns != VOID:
                raise CodegenError(f"expected {self.signature.name} to give back a value")
            self.emit_void("ret void")
            self._scopes.clear()
        return "\n".join(self._lines)

    def _check(self, used: Sequence[Value]) -> None:
        if not self._scopes:
            raise CodegenError(f"expected no more code: {self.signature.name} is finished")
        for value in used:
            if value.function is not self:
                raise CodegenError(
                    f"expected a value of {self.signature.name}, got {value!r} of "
                    f"{value.function.signature.name}; pass it as an argument"
                )
            if value.scope not in self._scopes:
                raise CodegenError(
                    f"expected a value that is live here, got {value!r} from a loop or branch "
                    f"that has ended; carry it out with loop or choose"
                )

    # --- labels and scopes

    def _label(self, purpose: str) -> str:
        self._count += 1
        return f"{purpose}{self._count}"

    def _begin(self, label: str) -> None:
        self._lines.append(f"{label}:")
        self._block = label

    def _branch(self, condition: Value, yes: str, no: str) -> None:
        self.value(condition, I1)
        self.emit_void(f"br {condition!r}, label %{yes}, label %{no}", condition)

    @contextmanager
    def _scope(self) -> Iterator[None]:
        self._count += 1
        self._scopes.append(self._count)
        yield
        self._scopes.pop()

    # --- loops

    def _open_loop(self, purpose: str, first: Sequence[Value]) -> _Loop:
        label, before = self._label(purpose), self._block
        self._check(first)
        self.emit_void(f"br label %{label}")
        self._begin(label)
        carried = [
            Value(self, value.type, f"%{label}.{place}", self._scopes[-1])
            for place, value in enumerate(first)
        ]
        return _Loop(label, before, len(self._lines), list(first), carried)

    def _close_loop(self, loop: _Loop, following: Sequence[Value]) -> None:
        if [x.type for x in following] != [x.type for x in loop.first]:
            raise CodegenError(f"expected {loop.first} to be carried on, got {list(following)}")
        self.emit_void(f"br label %{loop.label}", *following)
        self._lines[loop.phi_line : loop.phi_line] = [
            f"  {x.text} = phi {x.type} [{a.text}, %{loop.before}], [{b.text}, %{self._block}]"
            for x, a, b in zip(loop.carried, loop.first, following, strict=True)
        ]

    def repeat(
        self,
        condition: Callable[[list[Value]], Value],
        body: Callable[[list[Value]], Sequence[Value]],
        carry: Sequence[Value],
    ) -> list[Value]:
        """`while condition(carried): carried = body(carried)`; returns the last carried values."""
        loop = self._open_loop("loop", carry)
        self._branch(condition(loop.carried), f"{loop.label}.body", f"{loop.label}.end")
        self._begin(f"{loop.label}.body")
        with self._scope():
            self._close_loop(loop, body(loop.carried))
        self._begin(f"{loop.label}.end")
        return loop.carried

    def loop(
        self,
        start: Operand,
        stop: Operand,
        body: Callable[[Value, list[Value]], Sequence[Value]],
        *,
        carry: Sequence[Value],
        step: int = 1,
    ) -> list[Value]:
        """`for i in range(start, stop, step): carried = body(i, carried)`; returns the last."""
        end = self.value(stop, I64)

        def once(values: list[Value]) -> list[Value]:
            following = body(values[0], values[1:])
            return [values[0] + step, *following]

        first = [self.value(start, I64), *carry]
        return self.repeat(lambda values: values[0] < end, once, first)[1:]

    @contextmanager
    def range(self, start: Operand, stop: Operand, step: int = 1) -> Iterator[Value]:
        """`for i in range(start, stop, step)`, nothing carried."""
        end = self.value(stop, I64)
        loop = self._open_loop("range", [self.value(start, I64)])
        (index,) = loop.carried
        self._branch(index < end, f"{loop.label}.body", f"{loop.label}.end")
        self._begin(f"{loop.label}.body")
        with self._scope():
            yield index
            self._close_loop(loop, [index + step])
        self._begin(f"{loop.label}.end")

    @contextmanager
    def forever(self) -> Iterator[Callable[[Value], None]]:
        """`while True`; the yielded function leaves the loop if its condition holds."""
        loop = self._open_loop("forever", [])

        def leave(condition: Value) -> None:
            stay = self._label("stay")
            self._branch(condition, f"{loop.label}.end", stay)
            self._begin(stay)

        with self._scope():
            yield leave
            self._close_loop(loop, [])
        self._begin(f"{loop.label}.end")

    # --- branches

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """`if condition`, nothing carried out."""
        label = self._label("when")
        self._branch(condition, label, f"{label}.end")
        self._begin(label)
        with self._scope():
            yield
            self.emit_void(f"br label %{label}.end")
        self._begin(f"{label}.end")

    def choose(
        self,
        condition: Value,
        yes: Callable[[], Sequence[Value] | None],
        no: Callable[[], Sequence[Value] | None],
    ) -> list[Value]:
        """`yes() if condition else no()`, running only one; both return the same types, or None."""
        label = self._label("choose")
        self._branch(condition, f"{label}.yes", f"{label}.no")
        first, after_yes = self._side(f"{label}.yes", yes, f"{label}.end")
        second, after_no = self._side(f"{label}.no", no, f"{label}.end")
        if [x.type for x in first] != [x.type for x in second]:
            raise CodegenError(f"expected one type from both sides, got {first} and {second}")
        self._begin(f"{label}.end")
        return [
            self.emit(f"phi {x.type} [{x.text}, %{after_yes}], [{y.text}, %{after_no}]", x.type)
            for x, y in zip(first, second, strict=True)
        ]

    def _side(
        self, label: str, body: Callable[[], Sequence[Value] | None], end: str
    ) -> tuple[list[Value], str]:
        self._begin(label)
        with self._scope():
            results = list(body() or ())
            self.emit_void(f"br label %{end}", *results)
        return results, self._block

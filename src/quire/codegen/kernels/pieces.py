"""Pieces of keys that one item computes one after the other (`phases/order.py`).

Rows have two states in scratch: that of the piece which is being computed, and, in regions whose
names begin with `MERGED`, that of all pieces before it. A row of one piece is never merged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quire.codegen.convention import KEYS_OF_PIECE
from quire.codegen.kernels.visits import KeyBlock
from quire.codegen.llvm.builder import Function, Value
from quire.codegen.llvm.types import I64

NO_PIECE = -1  # before the first block of keys
MERGED = "merged_"


class Pieces(NamedTuple):
    """Which piece an item computes, and how many it has merged: two numbers in `memory`.

    `clear(MERGED)` and `clear("")` reset a state of all rows, and `merge()` adds the current one to
    the merged one.
    """

    f: Function
    memory: Value
    clear: Callable[[str], None]
    merge: Callable[[], None]

    def start(self) -> None:
        """Forget the pieces of the item before."""
        self.f.store(self.f.value(NO_PIECE, I64), self.memory)
        self.f.store(self.f.value(0, I64), self.memory, 1)
        self.clear("")

    def enter(self, block: KeyBlock) -> None:
        """If a block of keys begins another piece, merge the one before and start anew."""
        f = self.f
        here, known = block.origin.udiv(KEYS_OF_PIECE), f.load(I64, self.memory)
        with f.when(here.differs(known)):
            f.store(here, self.memory)
            with f.when(known.differs(NO_PIECE)):
                self._merge()
                self.clear("")

    def _merge(self) -> None:
        f, done = self.f, self.f.load(I64, self.memory, 1)
        with f.when(done.equals(0)):
            self.clear(MERGED)
        f.store(done + 1, self.memory, 1)
        self.merge()

    def several(self) -> Value:
        """Whether pieces have been merged, so that results are those in `MERGED`."""
        return self.f.load(I64, self.memory, 1).differs(0)

    def merge_last(self, copy: Callable[[], None]) -> None:
        """If there are several pieces, merge the last one, and `copy` what was merged."""
        with self.f.when(self.several()):
            self._merge()
            copy()

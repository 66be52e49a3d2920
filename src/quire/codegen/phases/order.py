"""The order in which a row adds: the same in both kernels, for every width of vectors.

What a query computes follows from its own numbers, its position and the keys that it reads. It does
not matter which kernel computes it, how many queries come with it, or how its keys are stored:

    score      one chain of multiply-adds over the head dim in ascending order, from 0; then times
               the factor of the key, if keys are int8
    maximum    is updated once for each block of 128 keys; sums and out so far then shrink by alpha
    sum        of the weights of a block: one chain for each run of 16 keys, from 0; then the sums
               of the runs, in ascending order. The sum so far, times alpha, is added to that
    out        one chain of multiply-adds over the keys of a block in ascending order, from 0. What
               there is so far, times alpha, is added to that
    piece      every 1,024 keys all of this starts anew. Pieces are merged in ascending order

Blocks, runs and pieces begin at multiples of their size, counted from position 0. A key that is not
read has the weight 0 and adds nothing, so it does not matter either which keys are skipped.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.codegen.llvm import vecmath
from quire.codegen.llvm.builder import Function, Value
from quire.codegen.llvm.types import Type
from quire.codegen.phases.transpose import transpose

KEYS_OF_RUN = 16
RUNS_OF_BLOCK = 8


def over_runs(
    f: Function, count: Value, lead: Value, of_run: Callable[[Value, Value], Value], nothing: Value
) -> Value:
    """The sums of runs, added in ascending order, where lanes run over queries.

    The first of `count` keys is the key `lead` of its run. `of_run(begin, end)` gives the sum of
    some keys, which are one run or the part of it that is there.
    """

    def add(run: Value, total: list[Value]) -> list[Value]:
        begin = f.maximum(run - lead, 0)
        end = f.minimum(run - lead + KEYS_OF_RUN, count)
        return [total[0] + of_run(begin, end)]

    return f.loop(0, lead + count, add, carry=[nothing], step=KEYS_OF_RUN)[0]


def sum_of_block(
    f: Function, vector: Type, numbers: Value, term: Callable[[Value], Value] = lambda x: x
) -> Value:
    """The same sum of `term` of all numbers of a block, one after the other in memory."""
    size = min(vector.lanes, RUNS_OF_BLOCK)
    some = vector.scalar.vector(size)
    runs: list[Value] = []
    for first in range(0, RUNS_OF_BLOCK, size):
        total = f.value(0.0, some)
        for column in range(0, KEYS_OF_RUN, size):
            places = [(first + run) * KEYS_OF_RUN + column for run in range(size)]
            square = [term(f.load(some, numbers, at, align=vector.scalar.size)) for at in places]
            for each in transpose(f, square):
                total = total + each
        runs += [f.extract(total, run) for run in range(size)]
    result = runs[0]
    for run in runs[1:]:
        result = result + run
    return result


def exp4_carefully(f: Function, x: Value) -> Value:
    """4**x for every x, and for x <= 0 exactly what `exp4_nonpositive` gives."""
    return f.select(x > 0.0, vecmath.exp4(f, x), vecmath.exp4_nonpositive(f, x))

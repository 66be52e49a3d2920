"""A cache of keys and values, and beside it a dictionary of tokens that says what it must hold.

Keys and values are a function of all tokens up to their position, as in a model, so that a page of
another prompt is noticed. After each action everything is read back, bit for bit, from memory in
which free pages and those of other sequences are NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import quire
from quire.errors import OutOfPages, ReleasedRowsError
from quire.kv import PagedKVCache, SequenceHandle
from quire.kv.pages import PageShape
from quire.memory import Paged
from quire.mods import causal
from quire.runtime.append import PageTensors, quantise

Choose = Callable[[int], int]
"""choose(n) is one of 0, 1, ..., n - 1."""

VOCABULARY = 3  # small, so that prompts begin alike
MOST_SEQUENCES = 6


def prefix_codes(tokens: Sequence[int]) -> list[int]:
    """A number for each position that depends on all tokens up to there."""
    codes, code = [], 1
    for token in tokens:
        code = (code * 1_000_003 + token + 1) % 2_147_483_647
        codes.append(code)
    return codes


def content(tokens: Sequence[int], layer: int, heads: int, width: int) -> Tensor:
    """The rows [tokens, heads, width] that a layer computes."""
    codes = torch.tensor(prefix_codes(tokens), dtype=torch.int64).view(-1, 1, 1)
    place = torch.arange(heads * width).view(1, heads, width) + 1 + 1000 * layer
    return ((codes * place) % 65_521).float() / 64


@functools.lru_cache(maxsize=10_000)
def _computed(shape: PageShape, layer: int, tokens: tuple[int, ...]) -> tuple[Tensor, ...]:
    key = content(tokens, layer, shape.heads, shape.head_dim)
    value = -content(tokens, layer, shape.heads, shape.value_dim)
    rows = (key,) if shape.latent else (key, value)
    return rows if shape.dtype.itemsize == 1 else tuple(each.to(shape.dtype) for each in rows)


@functools.lru_cache(maxsize=10_000)
def _stored(shape: PageShape, layer: int, tokens: tuple[int, ...]) -> dict[str, Tensor]:
    """What has to be in the pages, bit for bit."""
    rows = dict(zip(shape.sides, _computed(shape, layer, tokens), strict=True))
    if not shape.scaled:
        return {side: floats.to(shape.dtype) for side, floats in rows.items()}
    stored = {}
    for side, floats in rows.items():
        stored[side], stored[f"{side}_scale"] = quantise(floats, shape.dtype)
    return stored


class Tree(NamedTuple):
    """Drafts behind a prompt: the parent of each, -1 for that of a root, and its token."""

    prompt: list[int]
    parents: list[int]
    tokens: list[int]

    @classmethod
    def drawn(cls, choose: Choose, prompt: list[int]) -> Tree:
        count = choose(10)
        # Half of them follow the node before, so that there are long paths.
        parents = [node - 1 if choose(2) else choose(node + 1) - 1 for node in range(count)]
        return cls(list(prompt), parents, [choose(VOCABULARY) for _ in range(count)])

    def path(self, node: int) -> list[int]:
        """From a root to a node; that to -1 is empty."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    def text(self, node: int) -> list[int]:
        return [self.tokens[each] for each in self.path(node)]

    @property
    def chain(self) -> int:
        """How many of the first nodes follow each other, as tokens of a prompt do."""
        follows = [parent == node - 1 for node, parent in enumerate([*self.parents, -2])]
        return follows.index(False)


class Witness:
    """Does to a cache and to a dictionary the same, and compares them."""

    def __init__(self, cache: PagedKVCache, directory: Path) -> None:
        self.cache, self.directory = cache, directory
        self.keeps = cache._prefix is not None
        self.tokens: dict[SequenceHandle, list[int]] = {}
        self.salts: dict[SequenceHandle, bytes] = {}
        self.saved: dict[int, list[int]] = {}
        self.prompts: list[list[int]] = [[]]
        self.refusals = 0

    def _one(self, choose: Choose) -> SequenceHandle | None:
        known = list(self.tokens)
        return known[choose(len(known))] if known else None

    def _rows(self, layer: int, tokens: list[int]) -> tuple[Tensor, ...]:
        return _computed(self.cache.shape, layer, tuple(tokens))

    def _stored(self, layer: int, tokens: list[int]) -> dict[str, Tensor]:
        return _stored(self.cache.shape, layer, tuple(tokens))

    def _salt(self, sequence: SequenceHandle) -> bytes:
        return self.salts.get(sequence, b"")

    # --- actions

    def start(self, choose: Choose) -> None:
        if len(self.tokens) < MOST_SEQUENCES:
            self.tokens[self.cache.sequence()] = []

    def append(self, choose: Choose) -> None:
        batch = [sequence for sequence in self.tokens if choose(2)]
        new = {each: [choose(VOCABULARY) for _ in range(choose(8))] for each in batch}
        try:
            rows = self.cache.extend(batch, [len(new[each]) for each in batch])
        except OutOfPages:
            self.refusals += 1
            return
        for each in batch:
            self.tokens[each] = self.tokens[each] + new[each]
        for layer in range(self.cache.num_layers):
            made = [self._rows(layer, self.tokens[each]) for each in batch]
            parts = [
                [rows[len(rows) - len(new[each]) :] for rows in pair]
                for each, pair in zip(batch, made, strict=True)
            ]
            none = self._rows(layer, [])
            whole = (torch.cat([x, *(part[i] for part in parts)]) for i, x in enumerate(none))
            self.cache.write(layer, rows, *whole)
        self.prompts = [*self.prompts, *(list(self.tokens[each]) for each in batch)][-20:]

    def draft(self, choose: Choose) -> None:
        """Draft a tree behind each of some sequences, fork some, and accept a path of each."""
        trees = {each: Tree.drawn(choose, self.tokens[each]) for each in self.tokens if choose(2)}
        try:
            rows = self.cache.extend(list(trees), [len(tree.parents) for tree in trees.values()])
        except OutOfPages:
            self.refusals += 1
            return
        for layer in range(self.cache.num_layers):
            none = self._rows(layer, [])
            nodes = [
                [part[-1:] for part in self._rows(layer, [*tree.prompt, *tree.text(node)])]
                for tree in trees.values()
                for node in range(len(tree.parents))
            ]
            whole = (torch.cat([x, *(node[i] for node in nodes)]) for i, x in enumerate(none))
            self.cache.write(layer, rows, *whole)
        for each, tree in list(trees.items()):
            if choose(3) == 0 and len(self.tokens) < MOST_SEQUENCES:
                child = self.cache.fork(each)
                self.tokens[child], self.salts[child] = tree.prompt, self._salt(each)
                trees[child] = tree
            if self.keeps and choose(3) == 0:
                first = [*tree.prompt, *tree.text(tree.chain - 1)]
                self.cache.keep(each, first, salt=self._salt(each))
        self._accept(trees, choose)

    def _accept(self, trees: dict[SequenceHandle, Tree], choose: Choose) -> None:
        """A path of each tree; if there is no room for it, none."""
        leaves = {each: choose(len(tree.parents) + 1) - 1 for each, tree in trees.items()}
        paths = {each: tree.path(leaves[each]) for each, tree in trees.items()}
        prefixes = [len(tree.prompt) for tree in trees.values()]
        try:
            self.cache.accept(list(trees), prefixes, list(paths.values()))
        except OutOfPages:
            self.refusals += 1
            self.cache.check_integrity()
            for each, tree in trees.items():
                assert self.cache.length(each) == len(tree.prompt) + len(tree.parents)
                self.cache.truncate(each, len(tree.prompt))
        else:
            for each, tree in trees.items():
                self.tokens[each] = [*tree.prompt, *tree.text(leaves[each])]

    def give_up(self, choose: Choose) -> None:
        """Make room, write some layers, and go back."""
        sequence = self._one(choose)
        if sequence is None:
            return
        before = self.tokens[sequence]
        try:
            rows = self.cache.extend([sequence], 1 + choose(6))
        except OutOfPages:
            self.refusals += 1
            return
        if choose(2):
            some = self._rows(0, [0] * rows.num_tokens)
            self.cache.write(0, rows, *(torch.full_like(each, 99) for each in some))
        self.cache.truncate(sequence, len(before))

    def fork(self, choose: Choose) -> None:
        sequence = self._one(choose)
        if sequence is not None and len(self.tokens) < MOST_SEQUENCES:
            child = self.cache.fork(sequence)
            self.tokens[child] = list(self.tokens[sequence])
            self.salts[child] = self._salt(sequence)

    def truncate(self, choose: Choose) -> None:
        sequence = self._one(choose)
        if sequence is not None:
            length = choose(len(self.tokens[sequence]) + 1)
            try:
                self.cache.truncate(sequence, length)
            except ReleasedRowsError:
                self.refusals += 1
                assert any(self.cache.start(layer, sequence) for layer in self._layers())
            else:
                self.tokens[sequence] = self.tokens[sequence][:length]

    def free(self, choose: Choose) -> None:
        sequence = self._one(choose)
        if sequence is not None:
            self.cache.free(sequence)
            del self.tokens[sequence]
            self.salts.pop(sequence, None)

    def keep(self, choose: Choose) -> None:
        sequence = self._one(choose)
        if sequence is not None:
            tokens = self.tokens[sequence]
            self.cache.keep(sequence, tokens[: choose(len(tokens) + 1)], salt=self._salt(sequence))

    def match(self, choose: Choose) -> None:
        if len(self.tokens) < MOST_SEQUENCES:
            prompt = self.prompts[choose(len(self.prompts))]
            prompt = prompt[: choose(len(prompt) + 1)] + [choose(VOCABULARY)] * choose(6)
            salt = b"" if choose(4) else b"another tenant"
            sequence = self.cache.sequence(prompt, salt=salt)
            self.tokens[sequence] = prompt[: self.cache.length(sequence)]
            self.salts[sequence] = salt

    def evict(self, choose: Choose) -> None:
        self.cache.evict(choose(4))

    def save(self, choose: Choose) -> None:
        sequence = self._one(choose)
        if sequence is not None:
            which = choose(8)
            self.cache.save(sequence, self.directory / f"{which}")
            self.saved[which] = list(self.tokens[sequence])

    def load(self, choose: Choose) -> None:
        if self.saved and len(self.tokens) < MOST_SEQUENCES:
            which = list(self.saved)[choose(len(self.saved))]
            try:
                sequence = self.cache.load(self.directory / f"{which}")
            except OutOfPages:
                self.refusals += 1
            else:
                self.tokens[sequence] = list(self.saved[which])

    # --- what must hold

    def check(self) -> None:
        """Everything is sound, and every sequence reads back."""
        self.cache.check_integrity()
        self._poison_free_pages()
        sequences = list(self.tokens)
        assert self.cache.statistics().sequences == len(sequences)
        for layer in self._layers():
            memory = self.cache.memory(layer, sequences)
            assert memory.lengths.tolist() == [len(self.tokens[each]) for each in sequences]
            starts = [self.cache.start(layer, each) for each in sequences]
            pages = self.cache._group(layer).layers[layer].tensors
            value = pages.key[..., : memory.value.shape[3]] if pages.value is None else pages.value
            assert pages.key is memory.key and value.data_ptr() == memory.value.data_ptr()
            assert value.stride() == memory.value.stride()
            found = held_rows(memory, pages, starts)
            true = [self._stored(layer, self.tokens[each]) for each in sequences]
            assert all(found.keys() == rows.keys() for rows in true)
            for name, mine in found.items():
                parts = [rows[name][start:] for rows, start in zip(true, starts, strict=True)]
                assert torch.equal(mine, torch.cat([mine[:0], *parts]))

    def check_attention(self, choose: Choose) -> None:
        """Attention to one sequence is that to its rows alone, while all other pages are poison."""
        sequence = self._one(choose)
        if sequence is None:
            return
        for layer in self._layers():
            memory, start = self.cache.memory(layer, [sequence]), self.cache.start(layer, sequence)
            held = self.cache.dense(layer, sequence)
            shape = 1, 2 * self.cache.shape.heads, 1, self.cache.shape.head_dim
            narrow = held.key.dtype.itemsize == 1
            dtype = torch.float32 if narrow else held.key.dtype
            query = torch.full(shape, 1 / 1024, dtype=dtype)
            out = quire.attention(query, alone(memory, start), mask=causal)
            expected = quire.attention(query, held, mask=causal)
            if self.cache.shape.scaled:  # scales are multiplied in another order
                torch.testing.assert_close(out, expected)
            else:
                assert torch.equal(out, expected) and not out.isnan().any()

    def _layers(self) -> range:
        return range(self.cache.num_layers)

    def _poison_free_pages(self) -> None:
        for group in self.cache._groups:
            free = torch.from_numpy(group.pool.free_pages).long()
            for layer in group.layers.values():
                for pages in _parts(layer.tensors).values():
                    pages[free] = _poison(pages)


def _poison(pages: Tensor) -> float:
    """NaN, or a number of int8, whose scales are NaN."""
    return float("nan") if pages.is_floating_point() else 99


def _parts(tensors: PageTensors) -> dict[str, Tensor]:
    return {name: part for name, part in tensors._asdict().items() if part is not None}


def alone(memory: Paged, start: int) -> Paged:
    """The memory of one sequence, all pages of others being poison."""
    size = memory.key.shape[2]
    own = memory.page_table[0, start // size : -(-int(memory.lengths[0]) // size)].long()
    parts = {}
    for name in PageTensors._fields:
        pages = getattr(memory, name)
        if pages is not None:
            parts[name] = torch.full_like(pages, _poison(pages))
            parts[name][own] = pages[own]
    return replace(memory, **parts)


def held_rows(memory: Paged, tensors: PageTensors, starts: list[int]) -> dict[str, Tensor]:
    """The rows of all sequences from their starts on, one sequence after the other."""
    size, table = memory.key.shape[2], memory.page_table.tolist()
    first = [0] * len(starts) if memory.first_page is None else memory.first_page.tolist()
    assert starts == [page * size for page in first]
    places = [
        (table[row][position // size], position % size)
        for row, (start, end) in enumerate(zip(starts, memory.lengths.tolist(), strict=True))
        for position in range(start, end)
    ]
    page, place = torch.tensor(places, dtype=torch.int64).view(-1, 2).unbind(1)
    return {name: part.transpose(1, 2)[page, place] for name, part in _parts(tensors).items()}

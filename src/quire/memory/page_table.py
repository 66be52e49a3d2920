"""Page tables as users give them: checked, and in the one form that is read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.arguments import tensor_of
from quire.checks import check_kind
from quire.errors import ArgumentError
from quire.memory.sequences import Numbers, checked_counts

_ADVICE = "A row holds the pages of one sequence, in the order of its positions."


class PageTable(NamedTuple):
    """The pages of sequences: int32 [B, most], of which each sequence uses some."""

    numbers: Tensor
    num_pages: int

    def check_used(self, first: Numbers, last: Numbers) -> None:
        """Refuse a page that does not exist, among those from `first` up to `last`."""
        numbers: NDArray[np.int32] = self.numbers.numpy()
        if not numbers.size or (numbers.min() >= 0 and numbers.max() < self.num_pages):
            return
        place = np.arange(numbers.shape[1])
        used = (place >= first[:, None]) & (place < last[:, None])
        wrong = np.argwhere(used & ((numbers < 0) | (numbers >= self.num_pages)))
        if len(wrong):
            b, at = wrong[0].tolist()
            raise ArgumentError(
                f"page_table[{b}, {at}] must be one of the {self.num_pages} pages, but is "
                f"{numbers[b, at]}. {_ADVICE}"
            )


def checked_page_table(
    page_table: object, lengths: object, num_pages: int, page: int
) -> tuple[PageTable, Numbers]:
    """The table, and how many keys each of its sequences has."""
    tensor = tensor_of("integers", "page_table", page_table, ranks=(2,), advice=_ADVICE)
    check_kind("page_table", tensor)
    count, most = tensor.shape
    room = np.full(count, most * page)
    ends = checked_counts("lengths", lengths, room, f"{most} pages of {page} rows")
    if tensor.dtype != torch.int32:
        tensor = tensor.long().clamp(-1, 2**31 - 1).to(torch.int32)
    return PageTable(tensor.contiguous(), num_pages), ends


def first_keys(first_page: object, ends: Numbers, page: int) -> Numbers:
    """The position of the first key that each sequence still has."""
    if first_page is None:
        return np.zeros_like(ends)
    pages = checked_counts("first_page", first_page, -(-ends // page), "as many as it has pages")
    begins: Numbers = np.minimum(pages * page, ends)
    return begins

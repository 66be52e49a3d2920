"""Which pages of a cache belong to whom.

    page_table            2 5 . .       the cache [1, H, n_pages * page_size, D]
                          3 . . .
    physical_to_logical   . . 0 . . 1   page     0     1     2     3     4     5
                          . . . 0 . .   owner    -     -   0: 0  1: 0    -   0: 1

A slot is a row of both tables; `.` is -1. Here slot 0 has two blocks, in pages 2 and 5, and slot 1
has one. Comes in: slots, lengths and positions as integers. Goes out: the tables that PyTorch's
class has, which are the only state, so that the methods serve its instances too (`patch.py`). The
cache is the caller's, and no page of it is ever moved.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.arguments import whole_number
from quire.block_mask import BlockMask
from quire.block_mask.lists import ceil_div
from quire.dynamo import instead, never_traced, own
from quire.errors import OutOfPages, PageError
from quire.mods.compose import MaskMod, ScoreMod
from quire.paged.checks import (
    NO_PAGE,
    Integers,
    addresses,
    as_lengths,
    as_positions,
    as_slots,
    check_new,
)
from quire.paged.physical import physical_block_mask, physical_mask, physical_score
from quire.torch_private import paged_assign, paged_convert


class PagedAttention:
    """Which pages of a cache each sequence owns, as PyTorch's experimental `PagedAttention`.

    >>> paged = PagedAttention(n_pages=64, page_size=128, max_batch_size=8, device="cpu")
    >>> paged.reserve(torch.tensor([0, 1]), torch.tensor([300, 150]))    # all of them, or nothing
    >>> paged.assign(batch_idx, input_pos, k_val, v_val, k_cache, v_cache)
    >>> block_mask = paged.convert_logical_block_mask(logical_mask, kv_len=kv_len)
    >>> flex_attention(query, k_cache, v_cache, block_mask=block_mask, enable_gqa=True)

    A sequence is a slot, a row of `page_table` [max_batch_size, n_pages], which has the page of
    each of its logical blocks; `physical_to_logical` is the way back, `capacity` [max_batch_size]
    how many positions have a page, and `empty_pages` lists the pages without an owner. Mods read
    the tables at every call. `device` None is the accelerator if there is one, else the CPU.
    """

    def __init__(
        self,
        n_pages: int,
        page_size: int,
        max_batch_size: int,
        device: str | torch.device | None = None,
    ) -> None:
        advice = "Give the sizes of the cache as whole numbers."
        self.n_pages = whole_number("n_pages", n_pages, minimum=0, advice=advice)
        self.page_size = whole_number("page_size", page_size, minimum=1, advice=advice)
        slots = whole_number("max_batch_size", max_batch_size, minimum=0, advice=advice)
        if device is None:
            device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        table = torch.full((slots, self.n_pages), NO_PAGE, dtype=torch.int64, device=device)
        self.page_table = table
        self.physical_to_logical = table.clone()
        self.capacity = torch.zeros(slots, dtype=torch.int64, device=device)
        self.empty_pages = list(range(self.n_pages - 1, -1, -1))

    @never_traced
    def reserve(self, batch_idx: Integers, seq_len: Integers) -> None:
        """Give slots the pages that they lack for `seq_len` positions: one slot, or many.

        Both are [N] or 0-d; one length serves all slots. Where pages are short nobody gets any.
        """
        slots = as_slots(self, batch_idx).tolist()
        lengths = as_lengths(seq_len, len(slots))
        capacity = dict(zip(slots, self.capacity[slots].tolist(), strict=True))
        grown = []
        for slot, length in zip(slots, lengths, strict=True):
            count = ceil_div(length - capacity[slot], self.page_size)
            if count > 0:
                grown.append((slot, capacity[slot] // self.page_size, count))
                capacity[slot] += count * self.page_size
        wanted, empty = sum(count for _, _, count in grown), len(self.empty_pages)
        if wanted > empty:
            raise OutOfPages(
                f"requested {wanted} pages but there are only {empty} empty pages, so nothing was "
                f"reserved for slots {slots}. Erase a sequence, or make more pages."
            )
        for slot, first, count in grown:
            pages = torch.tensor(self.empty_pages[-count:], device=self.page_table.device)
            blocks = torch.arange(first, first + count, device=pages.device)
            del self.empty_pages[-count:]
            self.page_table[slot, blocks] = pages
            self.physical_to_logical[slot, pages] = blocks
            self.capacity[slot] = (first + count) * self.page_size

    @never_traced
    def erase(self, batch_idx: Integers) -> None:
        """Take back all pages of a slot, or of many: what they held belongs to nobody."""
        for slot in as_slots(self, batch_idx).tolist():
            pages = self.page_table[slot][self.page_table[slot] != NO_PAGE].tolist()
            self.capacity[slot] = 0
            self.page_table[slot] = NO_PAGE
            self.physical_to_logical[slot] = NO_PAGE
            self.empty_pages += pages

    @instead(own(paged_assign))
    def assign(
        self,
        batch_idx: Tensor,
        input_pos: Tensor,
        k_val: Tensor,
        v_val: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> None:
        """Write keys and values of some positions into the pages of their slots.

        batch_idx [B], input_pos [B, S], k_val [B, H, S, D], v_val [B, H, S, Dv], k_cache
        [1, H, n_pages * page_size, D] and v_cache the same with Dv. A position without a page is
        refused, and nothing is written.
        """
        slots, positions = as_slots(self, batch_idx), as_positions(input_pos)
        for name, val, cache in (("k", k_val, k_cache), ("v", v_val, v_cache)):
            check_new(self, slots, positions, name, val, cache)
        rows = addresses(self, slots, positions).flatten()
        for val, cache in ((k_val, k_cache), (v_val, v_cache)):
            cache[:, :, rows] = val.transpose(0, 1).flatten(1, 2)

    @instead(own(paged_convert))
    def convert_logical_block_mask(
        self,
        block_mask: torch_flex.BlockMask,
        batch_idx: Tensor | None = None,
        kv_len: Tensor | None = None,
    ) -> BlockMask:
        """The mask over physical positions of a mask over logical ones.

        Row b of `block_mask` is about slot `batch_idx[b]`, by default b; a mask with B=1 serves
        every slot in `batch_idx`. Its key blocks have the size of a page. Blocks that have no page
        do not exist, and positions from `kv_len[b]` on are hidden. Convert again when a sequence
        has other pages; within those it has, `kv_len` may grow in place.
        """
        return physical_block_mask(self, BlockMask.from_torch(block_mask), batch_idx, kv_len)

    def get_mask_mod(
        self,
        mask_mod: MaskMod | None,
        kv_len: Tensor | None = None,
        *,
        batch_idx: Tensor | None = None,
    ) -> MaskMod:
        """The mask_mod over physical positions of one over logical ones, by default of `noop_mask`.

        `b` is about slot `batch_idx[b]`, by default b, and hides positions from `kv_len[b]` on.
        `mask_mod` is given `b` as it comes, and a logical position of the slot even where the page
        is somebody else's.
        """
        return physical_mask(self, mask_mod, kv_len, batch_idx)

    def get_score_mod(
        self,
        score_mod: ScoreMod | None,
        kv_len: Tensor | None = None,
        *,
        batch_idx: Tensor | None = None,
    ) -> ScoreMod:
        """The score_mod over physical positions of one over logical ones; see `get_mask_mod`."""
        return physical_score(self, score_mod, kv_len, batch_idx)

    def check_integrity(self) -> None:
        """Prove that each page is empty or has one owner, and that the tables agree about it."""
        table, back = self.page_table.tolist(), self.physical_to_logical.tolist()
        owner: dict[int, str] = {}

        def own_page(page: int, who: str) -> None:
            if not 0 <= page < self.n_pages or page in owner:
                had = f"owned by {owner[page]}" if page in owner else "no page"
                raise _broken(f"page {page} is in {who} and is {had}")
            owner[page] = who

        for page in self.empty_pages:
            own_page(page, "empty_pages")
        for slot, capacity in enumerate(self.capacity.tolist()):
            count, rest = divmod(capacity, self.page_size)
            if rest or not 0 <= count <= self.n_pages:
                raise _broken(f"capacity[{slot}] is {capacity}, which is no number of pages")
            if any(page != NO_PAGE for page in table[slot][count:]):
                raise _broken(f"slot {slot} has pages beyond its capacity of {capacity}")
            expected = [NO_PAGE] * self.n_pages
            for block, page in enumerate(table[slot][:count]):
                own_page(page, f"block {block} of slot {slot}")
                expected[page] = block
            if back[slot] != expected:
                raise _broken(f"physical_to_logical[{slot}] is not the way back of page_table")
        if len(owner) < self.n_pages:
            lost = sorted(set(range(self.n_pages)) - owner.keys())
            raise _broken(f"pages {lost} are neither empty nor owned")


def _broken(what: str) -> PageError:
    return PageError(
        f"expected every page in empty_pages or with one owner, but {what}. Change the tables by "
        f"reserve and erase alone."
    )

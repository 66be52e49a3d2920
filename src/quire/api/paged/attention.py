"""Which pages of a cache belong to which sequence.

    page_table            2 5 . .       the cache [1, H, n_pages * page_size, D]
                          3 . . .
    physical_to_logical   . . 0 . . 1   page     0     1     2     3     4     5
                          . . . 0 . .   owner    -     -   0: 0  1: 0    -   0: 1

Each sequence has a slot, a row of both tables; `.` is -1. Here slot 0 has two blocks, in pages 2
and 5, and slot 1 has one. The tables are those of PyTorch's class and the only state, so that the
methods also work with its instances (`patch.py`). The cache belongs to the caller. Pages never
move.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.api.paged.checks import NO_PAGE, addresses, as_lengths, as_positions, as_slots, check_new
from quire.api.paged.physical import physical_block_mask, physical_mask, physical_score
from quire.block_mask import BlockMask
from quire.block_mask.blocks import ceil_div
from quire.checks.arguments import whole_number
from quire.errors import OutOfPages, PageError
from quire.memory import Integers
from quire.mods.compose import MaskMod, ScoreMod
from quire.support.dynamo import instead, never_traced, own
from quire.support.torch_private import paged_assign, paged_convert


class PagedAttention:
    """The pages that each sequence has in a cache, as PyTorch's experimental `PagedAttention`.

    >>> paged = PagedAttention(n_pages=64, page_size=128, max_batch_size=8, device="cpu")
    >>> paged.reserve(torch.tensor([0, 1]), torch.tensor([300, 150]))    # all of them, or nothing
    >>> paged.assign(batch_idx, input_pos, k_val, v_val, k_cache, v_cache)
    >>> block_mask = paged.convert_logical_block_mask(logical_mask, kv_len=kv_len)
    >>> flex_attention(query, k_cache, v_cache, block_mask=block_mask, enable_gqa=True)

    A sequence has a slot, which is a row of these tensors:

    - `page_table` [max_batch_size, n_pages]: the page of each logical block, or -1
    - `physical_to_logical` [max_batch_size, n_pages]: the logical block in each page, or -1
    - `capacity` [max_batch_size]: how many positions have a page

    `empty_pages` is a list of the pages that no slot has. Mods read the tables at every call.
    `device` None is the accelerator if there is one, else the CPU.
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
    def reserve(self, batch_idx: int | Integers, seq_len: int | Integers) -> None:
        """Give slots as many pages as they need for `seq_len` positions.

        `batch_idx` is a slot or slots [N]; `seq_len` is a length for all of them or lengths [N]. If
        there are not enough pages, no slot gets any, and OutOfPages is raised.
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
    def erase(self, batch_idx: int | Integers) -> None:
        """Take all pages from `batch_idx`, a slot or slots [N]. They become empty pages."""
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
        """Write the keys and values of new tokens into the pages of their slots.

        `batch_idx` [B] has the slots and `input_pos` [B, S] the positions of the tokens; `k_val` is
        [B, H, S, D] and `v_val` [B, H, S, Dv]; `k_cache` is [1, H, n_pages * page_size, D] and
        `v_cache` [1, H, n_pages * page_size, Dv]. If a position has no page, UnreservedError is
        raised and nothing is written.
        """
        slots, positions = as_slots(self, batch_idx), as_positions(input_pos)
        for name, val, cache in (("k", k_val, k_cache), ("v", v_val, v_cache)):
            check_new(self, name, val, cache, slots=slots, positions=positions)
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
        """Turn a mask over positions of sequences into a mask over rows of the cache.

        Batch b of `block_mask` is for slot `batch_idx[b]` of `batch_idx` [B], by default slot b. A
        mask with B=1 is used for every slot in `batch_idx`. Its key blocks must have the size of a
        page. Blocks without a page are left out, and positions from `kv_len[b]` of `kv_len` [B] on
        are hidden. Convert the mask again when a sequence gets other pages; while it has the same
        ones, `kv_len` may grow in place.
        """
        return physical_block_mask(self, BlockMask.from_torch(block_mask), batch_idx, kv_len)

    def get_mask_mod(
        self,
        mask_mod: MaskMod | None,
        kv_len: Tensor | None = None,
        *,
        batch_idx: Tensor | None = None,
    ) -> MaskMod:
        """Turn a mask_mod over positions, by default `noop_mask`, into one over rows of the cache.

        Batch b is slot `batch_idx[b]` of `batch_idx` [B], by default slot b. Rows of other slots
        are hidden, and positions from `kv_len[b]` of `kv_len` [B] on. `mask_mod` is given `b`
        unchanged, and position 0 for a row that is hidden.
        """
        return physical_mask(self, mask_mod, kv_len, batch_idx)

    def get_score_mod(
        self,
        score_mod: ScoreMod | None,
        kv_len: Tensor | None = None,
        *,
        batch_idx: Tensor | None = None,
    ) -> ScoreMod:
        """Turn a score_mod over positions into one over rows of the cache.

        `kv_len` [B] and `batch_idx` [B] mean the same as in `get_mask_mod`. Hidden rows get -inf.
        """
        return physical_score(self, score_mod, kv_len, batch_idx)

    def check_integrity(self) -> None:
        """Raise PageError unless each page is empty or in one slot, and the tables agree."""
        table, back = self.page_table.tolist(), self.physical_to_logical.tolist()
        owner: dict[int, str] = {}

        def own_page(page: int, who: str) -> None:
            if not 0 <= page < self.n_pages or page in owner:
                had = f"also in {owner[page]}" if page in owner else "not a page"
                raise _broken(f"page {page} is in {who} and is {had}")
            owner[page] = who

        for page in self.empty_pages:
            own_page(page, "empty_pages")
        for slot, capacity in enumerate(self.capacity.tolist()):
            count, rest = divmod(capacity, self.page_size)
            if rest or not 0 <= count <= self.n_pages:
                raise _broken(f"capacity[{slot}] is {capacity}, which is not that of whole pages")
            if any(page != NO_PAGE for page in table[slot][count:]):
                raise _broken(f"slot {slot} has pages beyond its capacity of {capacity}")
            expected = [NO_PAGE] * self.n_pages
            for block, page in enumerate(table[slot][:count]):
                own_page(page, f"block {block} of slot {slot}")
                expected[page] = block
            if back[slot] != expected:
                raise _broken(f"physical_to_logical[{slot}] is not the inverse of page_table")
        if len(owner) < self.n_pages:
            lost = sorted(set(range(self.n_pages)) - owner.keys())
            raise _broken(f"pages {lost} are neither empty nor in a slot")


def _broken(what: str) -> PageError:
    return PageError(
        f"every page must be in empty_pages or in one slot, but {what}. Change the tables with "
        f"reserve and erase only."
    )

"""The cache of keys and values: pages that are shared, forked and found again.

Reading order: cache (the whole of it), handles (sequences), groups (layers, and the memory they may
take), table (which pages a sequence holds), pool (which are free), prefix (pages by their tokens),
pages (the memory of a layer), files (a sequence on disk), page_map (who holds what, as text).
"""

from quire.kv.cache import PagedKVCache, Statistics
from quire.kv.groups import Group
from quire.kv.handles import Rows, SequenceHandle
from quire.kv.page_map import PageMap
from quire.kv.pool import PagePool
from quire.kv.prefix import PrefixCache

__all__ = [
    "Group",
    "PageMap",
    "PagePool",
    "PagedKVCache",
    "PrefixCache",
    "Rows",
    "SequenceHandle",
    "Statistics",
]

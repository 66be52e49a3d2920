"""The cache of keys and values: pages that are shared, forked and found again.

Reading order: cache (the whole of it), handles (sequences), paths (which drafts stay), groups
(layers, and the memory they may take), table (which pages a sequence holds), pool (which are free),
prefix (pages by their tokens), pages (the memory of a layer), saved and files (a sequence on disk),
survey and page_map (what is held, and by whom).
"""

from quire.kv.cache import PagedKVCache
from quire.kv.groups import Group
from quire.kv.handles import Rows, SequenceHandle
from quire.kv.page_map import PageMap
from quire.kv.pool import PagePool
from quire.kv.prefix import PrefixCache
from quire.kv.survey import Statistics

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

"""The cache of keys and values: pages that are shared, forked and found again.

Reading order: cache (the class that users see), handles (sequences), paths (which drafts are
accepted), groups (layers, and the limits of their memory), table (which pages a sequence holds),
pool (which pages are free), prefix (pages found by their tokens), pages (the tensors of a layer),
files (a sequence outside of pages, or on disk), survey and page_map (who holds which page).
"""

from quire.kv.cache import PagedKVCache
from quire.kv.files import SavedSequence
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
    "SavedSequence",
    "SequenceHandle",
    "Statistics",
]

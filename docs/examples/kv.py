"""Examples of the names of `quire.kv`; each cell is a program of its own."""

# %% quire.kv.PagedKVCache
import torch

from quire import attention
from quire.kv import PagedKVCache
from quire.mods import causal

cache = PagedKVCache(layers=1, heads=4, head_dim=64, page_size=16, n_pages=64)
a = cache.sequence()
cache.append([a], *torch.randn(2, 1, 40, 4, 64))  # keys and values of a prompt of 40 tokens
b = cache.fork(a)  # a page is copied when one of them writes to it
cache.append([a, b], *torch.randn(2, 1, 2, 4, 64))  # one more token for each
out = attention(torch.randn(2, 8, 1, 64), cache.memory(0, [a, b]), mask=causal)
assert cache.length(b) == 41 and cache.statistics().shared == 2

# %% quire.kv.Group
import torch

from quire.kv import Group, PagedKVCache

groups = [Group(layers=[0, 2]), Group(layers=[1, 3], window=32)]  # every other layer has a window
cache = PagedKVCache(groups=groups, heads=4, head_dim=32, page_size=16, n_pages=64)
a = cache.sequence()
cache.append([a], *torch.randn(2, 4, 100, 4, 32))  # a prompt
cache.append([a], *torch.randn(2, 4, 1, 4, 32))  # and one more token
assert cache.start(0, a) == 0 and cache.start(1, a) > 0  # pages out of reach are given back

# %% quire.kv.Rows
import torch

from quire.kv import PagedKVCache

cache = PagedKVCache(layers=2, heads=4, head_dim=32, page_size=16, n_pages=64)
a, b = cache.sequence(), cache.sequence()
rows = cache.extend([a, b], [20, 3])  # reserves rows for 20 tokens of a and 3 of b
for layer in range(2):
    cache.write(layer, rows, *torch.randn(2, 23, 4, 32))  # each layer writes them once
assert cache.length(a) == 20

# %% quire.kv.SequenceHandle
import torch

from quire.errors import SequenceError
from quire.kv import PagedKVCache

cache = PagedKVCache(layers=1, heads=4, head_dim=32, page_size=16, n_pages=64)
a = cache.sequence()
cache.append([a], *torch.randn(2, 1, 5, 4, 32))
cache.free(a)
try:
    cache.length(a)
except SequenceError as error:
    print(error)  # a freed handle is never another sequence

# %% quire.kv.Statistics
import torch

from quire.kv import PagedKVCache

cache = PagedKVCache(layers=1, heads=4, head_dim=32, page_size=16, n_pages=64)
cache.append([cache.sequence()], *torch.randn(2, 1, 40, 4, 32))
found = cache.statistics()
assert found.tokens == 40 and round(found.waste, 3) == round(8 / 48, 3)  # three pages of 16

# %% quire.kv.PageMap
import torch

from quire.kv import PagedKVCache

cache = PagedKVCache(layers=1, heads=4, head_dim=32, page_size=16, n_pages=64)
a = cache.sequence()
cache.append([a], *torch.randn(2, 1, 40, 4, 32))
print(cache.page_map())  # a drawing in text; quire.draw.pages makes a picture of many

# %% quire.kv.PagePool
from quire.kv import PagePool

pool = PagePool(8)
pages = pool.allocate(3)
pool.share(pages[:1])  # held twice now
assert pool.num_free == 5 and pool.num_shared == 1
pool.release(pages)
assert pool.num_free == 7  # the shared page is still held once
pool.check_integrity()

# %% quire.kv.PrefixCache
from quire.kv import PagePool, PrefixCache

pool = PagePool(8)
known = PrefixCache(pool, page_size=4)
pages = pool.allocate(2)
known.insert(range(8), pages)  # two full pages of tokens 0 to 7
assert known.match([0, 1, 2, 3, 9, 9, 9, 9]).tolist() == pages[:1].tolist()


# %% quire.kv.SavedSequence
import torch

from quire.kv import PagedKVCache, SavedSequence

cache = PagedKVCache(layers=1, heads=2, head_dim=8, page_size=4, n_pages=8)
a = cache.sequence()
cache.append([a], *torch.randn(2, 1, 10, 2, 8))
copied = cache.copy_out(a)
assert isinstance(copied, SavedSequence)
cache.free(a)  # its pages serve others
b = cache.restore(copied)
assert cache.length(b) == 10

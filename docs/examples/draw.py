"""Examples of the names of `quire.draw.pages`; each cell is a program of its own."""

# %% quire.draw.pages.draw_pages
import torch

from quire.draw.pages import draw_pages
from quire.kv import PagedKVCache

cache = PagedKVCache(layers=1, heads=1, head_dim=1, page_size=4, n_pages=12)
a = cache.sequence()
maps = []
for _ in range(6):
    cache.append([a], *torch.zeros(2, 1, 5, 1, 1))  # five tokens more
    maps.append(cache.page_map())
print(draw_pages(maps))  # the last map, as text; path="pages.svg" draws all of them

"""From the graphs of mods, masks and derivatives to functions that kernels call by pointer."""

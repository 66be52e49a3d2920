"""From a problem to running code: the disk cache, threads, and plans that put them together."""

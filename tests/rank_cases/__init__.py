"""What each rank of a group does in tests of `quire.distributed`. Every function runs on all ranks.

All ranks make the same whole tensors, compute the whole in one process, and compare their part.
"""

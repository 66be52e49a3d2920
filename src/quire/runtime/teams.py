"""Teams of OpenMP: the threads that wait for the next parallel region of a thread of Python.

Each thread of Python that computes has a team of its own, which stays until that thread ends. While
a process has more of these threads than cores, GNU's OpenMP sends them to sleep after each region,
and waking them takes longer than a small kernel does.
"""

from __future__ import annotations

import ctypes
import os

from quire.runtime.launch import GnuOpenMP, openmp_library, torch_threads

_SOFT = 1  # omp_pause_soft: what the program has set stays


def end_team() -> None:
    """End the threads that wait for the calling thread. Its next region starts new ones."""
    library = openmp_library()
    if library is None or not isinstance(torch_threads(), GnuOpenMP):
        return
    if os.path.basename(library).startswith("libgomp"):  # not LLVM's, which has the same functions
        pause = getattr(ctypes.CDLL(library), "omp_pause_resource_all", None)  # since GCC 9
        if pause is not None:
            pause(_SOFT)

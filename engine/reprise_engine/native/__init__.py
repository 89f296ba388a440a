"""Kernels for a CPU in C++, called over their C interface; plain torch where there is no library (`load_kernels`).

Threads: the library has no pool of its own. Its OpenMP functions are those of the libgomp that torch has loaded, and
every call names torch's number of threads, so the two never compete for the processor.
"""

from __future__ import annotations

from reprise_engine.native.kernels import Kernels, LinearWeights
from reprise_engine.native.library import available_levels, load_kernels, open_kernels

__all__ = ["Kernels", "LinearWeights", "available_levels", "load_kernels", "open_kernels"]

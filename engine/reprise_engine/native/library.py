"""Finds the compiled library and the best instruction set that this processor runs."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch

from reprise_engine.native.build import levels, library_path
from reprise_engine.native.kernels import Kernels

logger = logging.getLogger(__name__)


@cache
def load_kernels() -> Kernels | None:
    """The kernels at this processor's best level; None, with one warning a process, where they are not built."""
    path = library_path()
    try:
        kernels = open_kernels(available_levels()[0]) if path.exists() else None
    except (OSError, AttributeError) as error:
        logger.warning("The CPU kernels in %s cannot be loaded, using plain torch, which is slower: %s", path, error)
        return None
    if kernels is None:
        logger.warning(
            "The CPU kernels are not built, using plain torch, which is slower. With a C++ compiler on PATH, "
            "`python -m reprise_engine.native.build` builds them."
        )
        return None
    logger.info("CPU kernels: %s", kernels.level)
    return kernels


def open_kernels(level: str) -> Kernels:
    """The kernels compiled for `level`. Raises OSError where there is no library, ValueError where the processor lacks
    the level's instructions."""
    if level not in available_levels():
        raise ValueError(f"level is {level!r}; this processor runs {', '.join(available_levels())}")
    return Kernels(_library(library_path()), level)


def available_levels() -> tuple[str, ...]:
    """The compiled levels that this processor runs, best first. Raises OSError where there is no library."""
    supports = _library(library_path()).reprise_supports
    supports.argtypes, supports.restype = [ctypes.c_char_p], ctypes.c_int
    return tuple(level for level in levels() if supports(level.encode()))


@cache
def _library(path: Path) -> ctypes.CDLL:
    # torch has been imported by now, and with it, globally, the OpenMP functions that the library leaves undefined.
    assert torch.get_num_threads() > 0
    return ctypes.CDLL(str(path))

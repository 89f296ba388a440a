"""Engines of one machine that start on the same NPU do so one after the other.

What an engine's runtime takes outside torch can only be told from how much less of the device is free afterwards. An
engine that loads its weights meanwhile would be charged to this one, and would see less free than there will be. So
an engine holds a lock on its NPU from the first look at its memory until its pool is allocated. The kernel drops it
however the process ends. Containers do not share an NPU (the driver refuses the second), so files suffice.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reprise_engine.memory_promises import make_private

logger = logging.getLogger(__name__)


@contextmanager
def npu_turn(number: int, *, folder: Path | None = None) -> Iterator[None]:
    """Waits until no other engine of this user starts on the NPU of this number, and keeps others waiting inside.

    Without a usable folder there is a warning, and no waiting."""
    folder = folder or Path(tempfile.gettempdir()) / f"reprise-{os.getuid()}"
    try:
        make_private(folder)
        lock = os.open(folder / f"npu-{number}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        logger.warning("Engines that start on NPU %d at once may charge each other: %s: %s", number, folder, error)
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another engine is starting on NPU %d: waiting until it has its memory", number)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)

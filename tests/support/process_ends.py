"""Whether processes that a test did not start itself come to an end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil

PATIENCE = 20.0


def have_ended(processes: Sequence[psutil.Process]) -> bool:
    """Whether all end within the patience; one that nobody has waited for yet has ended too."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes):
            return True
        time.sleep(0.02)
    return False

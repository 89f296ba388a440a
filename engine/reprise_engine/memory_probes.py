"""What the memory plan is computed from: the machine, the cgroup, this process, the NPU."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

_MIB = 1024**2
# The API process in the same cgroup: interpreter, tokenizer, HTTP server (measured at 120 to 180 MiB).
_API_PROCESS = 192 * _MIB
# Interpreter and torch, where the process looks smaller since its weights are not paged in yet.
_LEAST_ENGINE_PROCESS = 256 * _MIB


def cgroup_memory_limit(
    *, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """The least memory limit over this process's cgroup and its ancestors, version 2 or 1; None where there is none.

    A limit at or above the machine's memory is none (version 1 writes "no limit" as a huge number).
    """
    limits = [
        limit
        for hierarchy, path, file_name in _memory_cgroups(root, membership)
        for limit in _limits_up_to(hierarchy, path, file_name)
    ]
    total = psutil.virtual_memory().total
    limits = [limit for limit in limits if limit < total]
    return min(limits, default=None)


def _memory_cgroups(root: Path, membership: Path) -> list[tuple[Path, str, str]]:
    """(hierarchy, path within it, name of the limit's file) of the cgroups that account this process's memory."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    found: list[tuple[Path, str, str]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found.append((root, path, "memory.max"))
        elif "memory" in controllers.split(","):
            found.append((root / "memory", path, "memory.limit_in_bytes"))
    return found


def _limits_up_to(hierarchy: Path, path: str, file_name: str) -> list[int]:
    # In a container the path is the host's while the root is the container's own cgroup: what is missing is skipped.
    folder = hierarchy / path.strip("/")
    limits: list[int] = []
    for candidate in (folder, *folder.parents):
        with suppress(OSError, ValueError):  # not a folder of this hierarchy, or "max"
            limits.append(int((candidate / file_name).read_text()))
        if candidate == hierarchy:
            break
    return limits


def engine_process_bytes(*, weights: int, api_process: bool = True) -> int:
    """Memory of this process beside the weights, and of the API process where it is in front of it, in bytes."""
    resident = psutil.Process().memory_info().rss
    return max(resident - weights, _LEAST_ENGINE_PROCESS) + (_API_PROCESS if api_process else 0)

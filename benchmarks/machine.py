"""What the figures depend on: the machine and the versions, without host names or paths."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import psutil

_ISA = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")


def machine_facts() -> dict[str, str]:
    cpu = _cpu_facts()
    flags = set(cpu.get("flags", "").split())
    return {
        "processor": cpu.get("model name", platform.processor() or platform.machine()),
        "cores": str(len(os.sched_getaffinity(0))),
        "instruction sets": " ".join(name for name in _ISA if name in flags) or "none of note",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }


def _cpu_facts() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def reprise_version() -> str:
    """With the commit, and whether the tree differs from it."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).resolve().parent
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    own = f"{version('reprise-engine')}, torch {version('torch')}, transformers {version('transformers')}"
    try:
        commit = git("rev-parse", "--short=10", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "../engine")
    except (OSError, subprocess.CalledProcessError):
        return own
    return f"{own}, commit {commit}{' with changes' if changed else ''}"


def other_load() -> float:
    """Processor seconds a second that others use right now, over a second."""
    return psutil.cpu_percent(interval=1.0) / 100 * (psutil.cpu_count() or 1)

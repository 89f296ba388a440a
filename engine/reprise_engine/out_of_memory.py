"""Whether an error means that memory ran out: which memory, and in which phase. Free of torch.

The engine's last words are then one line that whoever watches it may rely on (docs/memory.md):

    OutOfMemory: memory=npu phase=kv-cache: NPU out of memory. Tried to allocate 2.00 GiB … Lower …

`memory` is `npu`, or `host` (on a CPU the KV pool is there too). `phase` tells whether a smaller share would have
helped.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Literal

from reprise_engine.errors import OutOfMemory, RepriseError

Device = Literal["cpu", "npu"]

_CAUSE_LIMIT = 600
"""Characters of the allocator's message: torch_npu appends the driver's own trace."""


class Phase(StrEnum):
    """What the engine was doing. Of these, --gpu-memory-utilization decides over `kv-cache` and `running`."""

    START = "start"
    """None of the next three."""
    WEIGHTS = "weights"
    PROFILING = "profiling"
    """The largest step, run once to see what it takes."""
    KV_CACHE = "kv-cache"
    RUNNING = "running"


_ADVICE = {
    Phase.START: "Give the engine more memory, or serve a smaller model.",
    Phase.WEIGHTS: "The weights alone do not fit: serve a smaller model, or use a device with more memory.",
    Phase.PROFILING: (
        "The weights and one step do not fit: lower --max-num-batched-tokens and --max-num-seqs, or serve a smaller "
        "model."
    ),
    Phase.KV_CACHE: "Lower --gpu-memory-utilization, or end what else uses this memory.",
    Phase.RUNNING: "Lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs.",
}

# Of torch_npu's allocators, of the CANN runtime (error EL0004, codes 207001 and, from the device, 207018), of operators
# that call it, and of HCCL. Texts and codes: hicann/runtime, 681ef7610, src/dfx/error_manager/error_code.json and
# include/external/acl/error_codes/rt_error_codes.h.
_NPU = re.compile(
    r"NPU out of memory|Allocator tried to allocate .{0,40}\(NPU|ERR00006\b|\bEL0004\b|error code is 2070(01|18)\b"
    r"|Failed to allocate resource\[DeviceMemory\]|\bEI0011\b"
)
# CANN's, of the host: codes and torch_npu's class are those of a lack of the NPU's.
_HOST_BY_CANN = re.compile(r"\bEE1013\b")
# HCCL's, of registers and the like, where torch_npu takes "Failed to allocate" for memory.
_NOT_MEMORY = re.compile(r"Failed to allocate resource\[(?!DeviceMemory\])")
# The last one is torch_npu's, of memory pinned for copies.
_HOST = re.compile(r"DefaultCPUAllocator: |Cannot allocate memory|std::bad_alloc|host out of memory")


def memory_of(error: BaseException) -> Literal["npu", "host"] | None:
    """Which memory the error says has run out; None where it says something else."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    words = str(error)
    if _HOST_BY_CANN.search(words):
        return "host"
    if _NPU.search(words):
        return "npu"
    if _HOST.search(words):
        return "host"
    if _NOT_MEMORY.search(words):
        return None
    # torch's own class; torch is not imported here.
    return "npu" if type(error).__name__ == "OutOfMemoryError" else None


def as_out_of_memory(error: BaseException, phase: Phase) -> OutOfMemory | None:
    """The error in the form of the last words; None where it is no lack of memory, or one of ours already."""
    memory = None if isinstance(error, RepriseError) else memory_of(error)
    if memory is None:
        return None
    cause = " ".join(str(error).split()) or type(error).__name__
    if len(cause) > _CAUSE_LIMIT:
        cause = f"{cause[:_CAUSE_LIMIT].rstrip()} …"
    return OutOfMemory(f"memory={memory} phase={phase}: {cause.rstrip('.')}. {_ADVICE[phase]}")


@contextmanager
def naming_phase(phase: Phase) -> Iterator[None]:
    """Turns a lack of memory inside the block into OutOfMemory, whatever raised it."""
    try:
        yield
    except Exception as error:
        named = as_out_of_memory(error, phase)
        if named is None:
            raise
        raise named from error

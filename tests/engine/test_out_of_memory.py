"""Which errors mean that memory ran out, and how the engine says so in its last words."""

from __future__ import annotations

import errno
import pickle

import numpy as np
import pytest
import torch

from reprise_engine.errors import ConfigError, OutOfMemory
from reprise_engine.out_of_memory import Phase, as_out_of_memory, memory_of, naming_phase
from tests.support.fake_engine import NPU_OUT_OF_MEMORY

WORKSPACE = (
    "NPUWorkspaceAllocator tried to allocate 180.00 MiB(NPU 1; 60.96 GiB total capacity; 86.81 MiB free). If you want "
    "to reduce memory usage, take a try to set the environment variable TASK_QUEUE_ENABLE=1."
)
CANN = (
    "NPU function error: call aclnnMoeDistributeDispatchV2 failed, error code is 207001\n"
    "[ERROR] (PID:316198, Device:7, RankID:-1) ERR00100 PTA call acl api failed\n"
    "EL0004: [PID: 316198] Failed to allocate memory.\n        Possible Cause: Available memory is insufficient."
)


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (RuntimeError(NPU_OUT_OF_MEMORY), "npu"),
        (torch.OutOfMemoryError(NPU_OUT_OF_MEMORY), "npu"),
        (torch.OutOfMemoryError("in words of a later release"), "npu"),
        (RuntimeError(WORKSPACE), "npu"),
        (RuntimeError(CANN), "npu"),
        (MemoryError(), "host"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory"),
            "host",
        ),
        (RuntimeError("Malloc pin memory failed, host out of memory, Rried to allocate size: 1073741824"), "host"),
        (RuntimeError("NPU out of memory. device id: 0, allocated by others"), "npu"),
        # torch_npu makes its OutOfMemoryError of whatever has "Failed to allocate" in it (NPUException.cpp, isCannOOM);
        # the words are CANN's (hicann/runtime, src/dfx/error_manager/error_code.json, 681ef7610).
        (
            torch.OutOfMemoryError(
                "NPU function error: aclrtMallocHost, error code is 207001\nResource_Error_Insufficient_Host_Memory"
                "(EE1013): Failed to allocate 4096 bytes of host memory via malloc to Runtime."
            ),
            "host",
        ),
        (RuntimeError("NPU function error: aclnnMul, error code is 207018"), "npu"),
        (RuntimeError("EI0011: [PID: 1] Failed to allocate [1024] bytes of NPU memory."), "npu"),
        (RuntimeError("EI0007: Failed to allocate resource[DeviceMemory] with info [size:2]."), "npu"),
        (torch.OutOfMemoryError("EI0007: [PID: 1] Failed to allocate resource[Notify] with info [id:1]."), None),
        (RuntimeError("device on fire"), None),
        (RuntimeError("NPU function error: call aclnnAdd failed, error code is 507015"), None),
        (OSError(errno.ENOSPC, "No space left on device"), None),
        (ValueError("the out of memory flag"), None),
    ],
)
def test_which_memory_an_error_tells_of(error: Exception, memory: str | None) -> None:
    assert memory_of(error) == memory


def test_what_the_libraries_really_raise() -> None:
    # More than a process can address.
    with pytest.raises(MemoryError) as of_numpy:
        np.zeros(2**55, dtype=np.uint8)
    assert memory_of(of_numpy.value) == "host"
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**55, dtype=torch.uint8)
    assert memory_of(of_torch.value) == "host"


@pytest.mark.parametrize("phase", list(Phase))
def test_the_error_has_memory_and_phase_first_and_ends_in_advice(phase: Phase) -> None:
    with pytest.raises(OutOfMemory) as caught, naming_phase(phase):
        raise RuntimeError(CANN)
    message = str(caught.value)
    assert message.startswith(f"memory=npu phase={phase}: NPU function error: call aclnnMoe")
    assert "\n" not in message
    assert message.endswith(".")
    assert ("--gpu-memory-utilization" in message) == (phase in (Phase.KV_CACHE, Phase.RUNNING)), "where it helps"
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == message  # it crosses between the processes


def test_a_long_trace_of_the_driver_is_cut() -> None:
    named = as_out_of_memory(RuntimeError(f"{NPU_OUT_OF_MEMORY} {'frame ' * 1000}"), Phase.KV_CACHE)
    assert named is not None
    assert len(str(named)) < 900
    assert str(named).endswith("or end what else uses this memory.")


def test_other_errors_and_our_own_pass() -> None:
    with pytest.raises(ZeroDivisionError), naming_phase(Phase.WEIGHTS):
        raise ZeroDivisionError
    inner = OutOfMemory("memory=npu phase=weights: it is full")
    with pytest.raises(OutOfMemory) as caught, naming_phase(Phase.START):
        raise inner
    assert caught.value is inner
    with pytest.raises(ConfigError), naming_phase(Phase.PROFILING):
        raise ConfigError("--x is NPU out of memory")

"""Makes this process one that has an NPU. There is no way back, so it is for processes of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import backend_registration

from tests.support.npu.device.memory import GIB, DeviceMemory
from tests.support.npu.device.runtime import NpuRuntime
from tests.support.npu.device.tensor import DeviceState, NpuTensor, dispatch, factories
from tests.support.npu.device.torch_rules import patch_dlpack
from tests.support.npu.machine import Chip
from tests.support.npu.operators import npu_operators

_KEPT: list[object] = []
"""torch's registrations end with their objects; the operators with their context."""


def install(environment: Mapping[str, str] = os.environ) -> NpuRuntime:
    """Registers device, operators and torch.npu, as the environment says (`process.npu_environment`)."""
    broken = environment.get("EMULATED_NPU_BROKEN")
    if broken:
        raise ImportError(broken)
    chip = Chip(environment.get("EMULATED_NPU_CHIP", "910B"))
    total = int(environment.get("EMULATED_NPU_MEMORY", 2 * GIB))
    memory = DeviceMemory(total, int(environment.get("EMULATED_NPU_TAKEN", "0")))
    visible = environment.get("ASCEND_RT_VISIBLE_DEVICES")
    count = int(environment.get("EMULATED_NPU_COUNT", "1"))
    if visible is not None:
        count = len([index for index in visible.split(",") if index.strip().isdigit() and int(index) < count])
    NpuTensor.state = DeviceState(memory, chip, jit_compile=chip is Chip.ASCEND_310P)
    runtime = NpuRuntime(NpuTensor.state, chip, count)
    backend_registration._setup_privateuseone_for_python_backend("npu", backend_module=runtime)
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for name, function in factories(memory).items():
        library.impl(name, function, "PrivateUse1")
    others: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]  # the same
    others.fallback(lambda operation, *args, **kwargs: dispatch(operation, args, kwargs), "PrivateUse1")
    operators = npu_operators(chip, also_float32=environment.get("EMULATED_NPU_FLOAT32") == "1")
    NpuTensor.state.formats = operators.__enter__().formats
    patch_dlpack(lambda tensor: isinstance(tensor, NpuTensor), NpuTensor)
    _KEPT.extend((library, others, operators))
    return runtime

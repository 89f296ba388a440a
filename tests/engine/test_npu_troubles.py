"""What torch_npu, CANN and the driver really say, and what is made of it: one line, with what to do.

Most texts are from public reports, named by issue, and those named by a code are the templates of CANN's runtime
(hicann/runtime, 681ef7610, src/dfx/error_manager/error_code.json): V of vllm-project/vllm-ascend, P of Ascend/pytorch,
S of sgl-project/sglang, G of gpustack/gpustack, C of Ascend/cann-container-image, M of vllm-project/vllm.
"""

from __future__ import annotations

import logging
import pickle
from multiprocessing import Pipe

import pytest

from reprise_engine.config import EngineConfig, ModelConfig
from reprise_engine.errors import ConfigError, DeviceError
from reprise_engine.messages import Start, StartupFailed
from reprise_engine.npu_troubles import as_device_error, told
from reprise_engine.out_of_memory import Phase, as_out_of_memory
from reprise_engine.process import serve
from tests.support.fake_engine import NPU_OUT_OF_MEMORY

SO = "cannot open shared object file: No such file or directory"
DRIVER = "The Ascend driver is not visible here. "
CANN = "CANN is not found. "
NNAL = "CANN's transformer library (NNAL) is not found. "
TORCH = "torch_npu was built for another torch. "
VERSIONS = "CANN, its operators and torch_npu do not fit each other, or not this chip. "
NUMBER = "There is no NPU of that number here. "
TAKEN = "The NPU belongs to another container or process. "
NO_ACCESS = "The driver does not let this process at an NPU. "
NOT_STARTED = "The NPU could not be started. "
CHIP = "This CANN and torch_npu do not know the NPU. "
PORTS = "Another process has the ports of these NPUs. "
APART = "The NPUs of this engine do not reach each other. "
FAULT = "The NPU reported a fault. "
UNKNOWN = "CANN reported an error that the engine knows no cure for. "

SAID = {
    "driver": (f"libascend_hal.so: {SO}", DRIVER),
    "V152": (f"libatb.so: {SO}", NNAL),
    "hccl": (f"libhccl.so: {SO}", CANN),
    "acl": (f"libascendcl.so: {SO}", CANN),
    "P35": ("/site-packages/torch_npu/lib/libtorch_npu.so: undefined symbol: _ZN5torch10ValueErrorC1EPKcz", TORCH),
    "S28628": (
        "/usr/local/python3.11.14/lib/python3.11/site-packages/torch_npu/lib/libtorch_npu.so: undefined symbol: "
        "_ZNK3c1010TensorImpl20is_contiguous_customENS_12MemoryFormatE",
        TORCH,
    ),
    "P24": ("No module named 'torch_npu._C'", TORCH),
    "autoload": ("module 'torch_npu' has no attribute '_autoload'", TORCH),
    "V117": (
        "/site-packages/torch_npu/lib/libtorch_npu.so: undefined symbol: "
        "_ZN3atb15CreateOperationINS_5infer14GroupTopkParamEEEiRKT_PPNS_9OperationE",
        VERSIONS,
    ),
    "P99": (
        "/usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_1/lib/libtbe_adapter.so: undefined symbol: "
        "_ZN3Mki2DlC1ERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEb",
        VERSIONS,
    ),
    "M8054": (
        "aclnnPromptFlashAttentionV3 or aclnnPromptFlashAttentionV3GetWorkspaceSize not in libopapi.so, or libopapi.so"
        "not found.",
        VERSIONS,
    ),
    "V4859": (
        "zero_:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:26 NPU function error: call aclnnInplaceZero failed, "
        "error code is 561103\n[ERROR] 2025-12-10-10:52:09 (PID:3473945, Device:0, RankID:-1) ERR00100 PTA call acl "
        "api failed.",
        VERSIONS,
    ),
    "V2244": (
        "SetPrecisionMode:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:156 NPU function error: "
        "at_npu::native::AclSetCompileopt(aclCompileOpt::ACL_PRECISION_MODE, precision_mode), error code is 500001\n"
        "[ERROR] 2025-08-06-08:32:47 (PID:554, Device:0, RankID:-1) ERR00100 PTA call acl api failed\n"
        "[Error]: The internal ACL of the system is incorrect.",
        VERSIONS,
    ),
    "V4284": (
        "Initialize:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:152 NPU function error: "
        "c10_npu::SetDevice(device_id_), error code is 507033\n[ERROR] 2025-11-19-11:14:58 (PID:356, Device:0, "
        "RankID:-1) ERR00100 PTA call acl api failed\n[Error]: Failed to start the device.\nE30006: Failed to verify "
        "the OPP\n        Possible Cause: 1.The OPP is incorrect.",
        VERSIONS,
    ),
    "P7": ("EH9999: Inner Error!\nEH9999  [Init][Env]init env failed![FUNC:ReportInnerError]", VERSIONS),
    "newer operator": ("Current CANN version do not support this api: npu_quant_max. Please try to update.", VERSIONS),
    "P67": (
        "Initialize:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:146 NPU function error: "
        "c10_npu::SetDevice(device_id_), error code is 507033\n[Error]: Failed to start the device.\nEL0003: The "
        "argument is invalid.\n        Failed to open device, retCode=0x7020014, deviceId=0.[FUNC:InitRawDriver]",
        NUMBER,
    ),
    "G3352": (
        "[INIT][DEFAULT]set ASCEND_RT_VISIBLE_DEVICES:[4] error, input data rang[0-2)\n"
        "aclrtSetDeviceImpl: open device 0 failed, runtime result = 107001.",
        NUMBER,
    ),
    "V10227": ("SetDevice(device), error code is 107001\n[Error]: Invalid device ID.", NUMBER),
    "busy": (
        "EL0005: [PID: 6] 2026-02-21-16:36:40.114.368 The resources are busy.\n        Possible Cause: 1. The "
        "resources have been occupied.",
        TAKEN,
    ),
    "drvRet": ("[drv api] halGetDeviceInfo failed, drvRet=87\nrtGetDevMsg execute failed", TAKEN),
    "drvRetCode": ("drvGetDevNum failed: device count=0, drvRetCode=87!", TAKEN),
    "C46": ("dcmi model initialized failed, because the device is used. ret is -8020", TAKEN),
    "V2698": (
        "DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\ndcmi module initialize failed. ret is -8005",
        NO_ACCESS,
    ),
    "V13399": (
        "rtGetDeviceCount execution failed, reason=driver error:internal error[FUNC:FuncErrorReason]\n"
        "        get device count failed, runtime result = 507899.[FUNC:ReportCallError][FILE:log_inner.cpp]\n"
        "        chipType=0 does not support get device msg feature.[FUNC:GetDevMsg]",
        NO_ACCESS,
    ),
    "V1558": (
        "Initialize:torch_npu/csrc/core/npu/sys_ctrl/npu_sys_ctrl.cpp:146 NPU function error: "
        "c10_npu::SetDevice(device_id_), error code is 507033\n[ERROR] 2025-07-01-08:38:50 (PID:114020, Device:-1, "
        "RankID:1) ERR00100 PTA call acl api failed",
        NOT_STARTED,
    ),
    "EE1015": (
        "EE1015: [PID: 7] aclrtSetDevice failed. Reason: The driver version capability is insufficient. ",
        VERSIONS,
    ),
    "EI0008": ("EI0008: The HCCL versions are inconsistent: tag [a], local_version [8], remote_version [9]", VERSIONS),
    "EE2002": (
        "EE2002: Value 0,7 for environment variable ASCEND_RT_VISIBLE_DEVICES is invalid. Expected value: [0, 2).",
        NUMBER,
    ),
    "EL0001": ("error code is 207004\nEL0001: [PID: 7] Device not found or invalid.", NO_ACCESS),
    "EL0007": ("error code is 207006\nEL0007: [PID: 7] You have no permission.", NO_ACCESS),
    "EL0015": (
        "error code is 507033\nEL0015: [PID: 7] The device access is invalid.\n        Possible Cause: 1. The device "
        "has been bound to another container. 2. You have no permission on this device.",
        TAKEN,
    ),
    "EI0006": (
        "createHCCLComm:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:37 HCCL function error: hcclCommInitRootInfo"
        "Config, error code is 4\n[ERROR] 2026-03-02-15:44:05 (PID:1, Device:1, RankID:1) ERR02200 DIST call hccl api "
        "failed.\nEI0006: [PID: 1] Getting socket times out. Reason: remote 0 has not connected",
        APART,
    ),
    "EI0015": (
        "EI0015: Failed to collect cluster information of the communicator based on rootInfo detection. Reason: …",
        APART,
    ),
    "EI0010": ("EI0010: P2P communication failed. Reason: enable p2p of device 1 timed out", APART),
    "EJ0001": (
        "ERR02200 DIST call hccl api failed.\nEJ0001: [PID: 1] Failed to initialize the HCCP process. Reason: Maybe "
        "the last training process is running.",
        PORTS,
    ),
    "EJ0003": ("EJ0003: [PID: 1] Failed to bind the IP port. Reason: the IP address and port have been bound", PORTS),
    "P57": ("Unsupported SOC version: Ascend310B4", CHIP),
    "P66": (
        "operator(): NPU function error: c10_npu::acl::AclrtSynchronizeStreamWithTimeout(copy_stream), error code is "
        "507035\n[Error]: The vector core execution is abnormal.",
        FAULT,
    ),
    "aicore": (
        "NPU function error: call aclnnAdd failed, error code is 507015\n[Error]: The aicore execution …",
        FAULT,
    ),
    "lost": ("NPU function error: c10_npu::acl::AclrtSynchronizeStream, error code is 507010", FAULT),
    "overflow": ("call aclnnIndex failed, error code is 507042\n[Error]: The AICore trap read overflow", FAULT),
    "hccl api": ("HCCL function error: HcclAllReduce, error code is 5\nERR02200 DIST call hccl api failed.", UNKNOWN),
    "V6935": (
        "LazySetDevice:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:21 …\n[ERROR] 2026-03-02-15:44:05 (PID:1, "
        "Device:-1, RankID:-1) ERR99999 UNKNOWN applicaiton exception",
        UNKNOWN,
    ),
    "V2396": ("The argument is invalid.Reason: rtGetDevMsg execute failed, reason=[context pointer null]", UNKNOWN),
    "aclInit": ("NPU function error: aclInit, error code is 100039", UNKNOWN),
}


@pytest.mark.parametrize(("words", "means"), SAID.values(), ids=SAID.keys())
def test_what_people_have_met(words: str, means: str) -> None:
    error = as_device_error(RuntimeError(words))
    assert error is not None
    line = str(error)
    assert line.startswith(means)
    assert "\n" not in line
    cause = " ".join(words.split())
    assert line.endswith(f"It was said: {cause}") or (len(cause) > 300 and line.endswith(" …"))
    assert str(pickle.loads(pickle.dumps(error))) == line, "it crosses between the processes"


def test_what_is_no_trouble_of_an_npu_is_left_alone() -> None:
    for error in (
        ValueError("507033 tokens"),
        KeyError("libhccl"),
        RuntimeError("shape '[2]' is invalid"),
        OSError("full"),
    ):
        assert as_device_error(error) is None
    assert as_device_error(ConfigError("error code is 507033")) is None, "ours already"
    assert as_device_error(DeviceError("error code is 507033")) is None
    assert told(RuntimeError("a\n  b")) == "a b"


def test_a_lack_of_memory_is_another_thing() -> None:
    """It is asked for first: the operator lowers the share by it."""
    words = f"{NPU_OUT_OF_MEMORY}\n[ERROR] ERR99999 UNKNOWN applicaiton exception"
    assert as_out_of_memory(RuntimeError(words), Phase.RUNNING) is not None


def cannot_be_opened(_config: EngineConfig, **_keywords: object) -> None:
    """A builder, as the engine process calls it."""
    raise RuntimeError(SAID["V1558"][0])


def test_the_engine_process_ends_with_that_line_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = Pipe()
    config = EngineConfig(model=ModelConfig(model="/nowhere"))
    ours.send(Start(config, f"{__name__}:{cannot_be_opened.__name__}", logging.INFO))
    assert serve(theirs) == 1
    told_to_client = ours.recv()
    assert isinstance(told_to_client, StartupFailed)
    assert isinstance(told_to_client.error, DeviceError)
    assert str(told_to_client.error).startswith(NOT_STARTED)
    assert "Traceback" not in caplog.text


def test_a_long_trace_of_the_runtime_is_cut() -> None:
    line = told(RuntimeError("error code is 507033 " + "frame " * 1000))
    assert len(line) < 700

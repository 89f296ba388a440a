"""What an error of torch_npu, CANN or the driver means, and what to do about it. Free of torch.

The words are those of torch_npu 2.13.0, of CANN's runtime and HCCL (hicann/runtime, 681ef7610,
src/dfx/error_manager/error_code.json; rt_error_codes.h) and of the driver (ascend_hal), as people report them; the
first row that matches tells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from reprise_engine.errors import DeviceError, RepriseError

_CAUSE_LIMIT = 300
"""Characters of the error itself: torch_npu appends the runtime's own trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """`means` and `advice` are sentences."""

    signs: re.Pattern[str]
    means: str
    advice: str


def _trouble(signs: str, means: str, advice: str) -> Trouble:
    return Trouble(signs=re.compile(signs, re.IGNORECASE), means=means, advice=advice)


_IMAGE = "Use the engine's image for NPUs (docs/ascend.md), whose versions belong together"

TROUBLES = (
    # --- libraries that are not there
    _trouble(
        r"lib(ascend_hal|drvdsmi_host|dcmi|c_sec|mmpa)[\w.]*: cannot open shared object",
        "The Ascend driver is not visible here.",
        "In Kubernetes set spec.accelerator.driver to hostPath, or use the runtime class of the Ascend Docker Runtime; "
        "elsewhere mount /usr/local/Ascend/driver and put its lib64/driver and lib64/common into LD_LIBRARY_PATH.",
    ),
    _trouble(
        r"libatb[\w.]*: cannot open shared object",
        "CANN's transformer library (NNAL) is not found.",
        f"{_IMAGE}, or install it and source /usr/local/Ascend/nnal/atb/set_env.sh.",
    ),
    _trouble(
        r"lib(hccl|ascendcl|acl_\w+|ge_\w+|graph|opapi|runtime|msprofiler|profapi|tiling_api|register|nnopbase|"
        r"platform|error_manager)[\w.]*: cannot open shared object",
        "CANN is not found.",
        f"{_IMAGE}, or install CANN and source /usr/local/Ascend/ascend-toolkit/set_env.sh.",
    ),
    # --- versions that do not belong together
    _trouble(
        r"undefined symbol: _ZNK?(3c10|5torch|2at|6caffe2)|No module named 'torch_npu\._C'|"
        r"has no attribute '_autoload'|(built|compiled) (for|with|against) (a different )?(torch|PyTorch)",
        "torch_npu was built for another torch.",
        "Install the engine with its [npu] extra and constraints.txt, which pin both.",
    ),
    _trouble(
        r"undefined symbol|not in lib(opapi|cust_opapi|ascendcl)|upgrade (the )?CANN|CANN version|"
        r"Failed to find function acl|update the version of CANN|\bE30006\b|Failed to verify the OPP|"
        r"error code is 561103|error code is 500001|init env failed|does not match CANN|upgrade the HDK|"
        r"\bEE1015\b|driver version capability is insufficient|\bEI0008\b",
        "CANN, its operators and torch_npu do not fit each other, or not this chip.",
        f"{_IMAGE}: CANN for the chip (910b, a3 or 310p), as new as torch_npu 2.13 wants, and a driver as new as CANN.",
    ),
    # --- devices that are not there, or not ours
    _trouble(
        r"error code is 107001|Invalid device ID|ASCEND_RT_VISIBLE_DEVICES(:\[| is invalid)|\bEL0002\b|"
        r"retCode=0x7020014|device id error",
        "There is no NPU of that number here.",
        "Correct ASCEND_RT_VISIBLE_DEVICES, or unset it: a container's own devices are counted from 0.",
    ),
    _trouble(
        r"drvRet(Code)?\W{0,2}87\b|\bEL0005\b|The resources are busy|because the device is used|Device is busy|"
        r"uda_occupy_dev|\bEL0015\b|bound to another container",
        "The NPU belongs to another container or process.",
        "Find it with `npu-smi info` on the node and end it, or take another NPU. Two containers never share one.",
    ),
    _trouble(
        r"error code is 507899|driver error:internal error|dcmi model? ?\w* ?initialized? failed|ret is -8005|"
        r"get device count failed|get hardware version fail|drvRet(Code)?\W{0,2}(4|46|88)\b|"
        r"error code is 20700[46]|\bEL000[17]\b",
        "The driver does not let this process at an NPU.",
        "Check that the pod asks for one, that the process is in group 1000 (HwHiAiUser), that the driver is as new as "
        "CANN, and that `npu-smi info` works on the node.",
    ),
    _trouble(
        r"error code is 507033|Failed to start the device|device is unavailable",
        "The NPU could not be started.",
        "Check with `npu-smi info` on the node whether it is healthy and whose it is: another container may hold it, "
        "or the driver may be older than CANN.",
    ),
    _trouble(
        r"Unsupported soc ?version",
        "This CANN and torch_npu do not know the NPU.",
        "The engine runs on 910B, 910C and 310P: use one of these, or --device cpu.",
    ),
    # --- several of them
    _trouble(
        r"\bEJ000[13]\b|Failed to bind the IP port|Failed to initialize the HCCP process",
        "Another process has the ports of these NPUs.",
        "End it, and wait ten seconds. Where engines share the host's network, let HCCL choose its ports: set "
        "HCCL_HOST_SOCKET_PORT_RANGE and HCCL_NPU_SOCKET_PORT_RANGE to auto.",
    ),
    _trouble(
        r"\b(EI0002|EI0006|EI0010|EI0015|EJ0002)\b|Getting socket times out|P2P communication failed",
        "The NPUs of this engine do not reach each other.",
        "A rank that ended first is the cause of the others' error: look for it in the log. Else check the NPUs' links "
        "with `npu-smi info -t topo` on the node, and that no HCCL_ variable of another machine is set; where P2P "
        "fails, set HCCL_INTRA_ROCE_ENABLE to 1.",
    ),
    # --- faults while it runs
    _trouble(
        r"error code is (507010|507011|507012|507013|507014|507015|507016|507017|507018|507034|507035|507036|507042|"
        r"507043|507044|507045|507046|507047|507048|507049|507050|507053|507054|507055|507056|507057|507901|107019|"
        r"107020)\b|"
        r"(aicore|aicpu|vector core) (execution|exception)|HBM Multi-?Bit ECC",
        "The NPU reported a fault.",
        "Look at `npu-smi info -t health -i 0` on the node and at the logs in ~/ascend/log. If it is well and the "
        "fault comes again, report it with that log (docs/ascend.md).",
    ),
    _trouble(
        r"\bERR99999\b|PTA call acl api failed|call hccl api failed|rtGetDevMsg|\baclInit\b|\bE[A-Z]?9999\b|\bEE8888\b",
        "CANN reported an error that the engine knows no cure for.",
        "The logs in ~/ascend/log say more, and `npu-smi info` on the node shows whether the NPU is healthy and free. "
        "How to report it is in docs/ascend.md.",
    ),
)


def trouble_of(error: BaseException) -> Trouble | None:
    """What is known of the error; None where nothing is."""
    words = str(error)
    return next((trouble for trouble in TROUBLES if trouble.signs.search(words)), None)


def told(error: BaseException) -> str:
    """One line: what it means, what was said, what to do. Of an error that nothing is known of, what was said."""
    cause = first_words(error)
    trouble = trouble_of(error)
    return cause if trouble is None else f"{trouble.means} {trouble.advice} It was said: {cause}"


def as_device_error(error: BaseException) -> DeviceError | None:
    """The error in one line with advice; None where nothing is known of it, or it is ours already."""
    if isinstance(error, RepriseError) or trouble_of(error) is None:
        return None
    return DeviceError(told(error))


def first_words(error: BaseException) -> str:
    """The error in one line, without the end of a long trace."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= _CAUSE_LIMIT else f"{words[:_CAUSE_LIMIT].rstrip()} …"

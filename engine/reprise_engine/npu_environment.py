"""What the environment says of NPUs: which ones are visible, and settings of torch_npu, which reads them when it is
imported. Free of torch.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from reprise_engine.errors import ConfigError

VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
ALLOCATOR = "PYTORCH_NPU_ALLOC_CONF"
TASK_QUEUE = "TASK_QUEUE_ENABLE"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
SUMS = "HCCL_DETERMINISTIC"

_NUMBERS = re.compile(r"[0-9]+(,[0-9]+)*")
# Of the driver (hw_vdavinci): vendor Huawei, device Ascend 310P.
_310P = ("0x19e5", "0xd500")


def is_torch_npu_installed() -> bool:
    """And not hidden."""
    return importlib.util.find_spec("torch_npu") is not None


def hide_torch_npu() -> None:
    """Makes torch_npu as good as not installed, in this process. transformers imports it wherever it is installed, and
    fails with it where driver or CANN are missing, though nothing of it is wanted."""
    if "torch_npu" not in sys.modules and is_torch_npu_installed():
        sys.modules["torch_npu"] = None  # type: ignore[assignment]  # Python's way of saying so


def npu_settings(environment: Mapping[str, str], *, pci: Path = Path("/sys/bus/pci/devices")) -> dict[str, str]:
    """Variables to be set before torch is imported: those that the user has not set.

    Segments of memory that grow keep an engine that runs for long from fragmenting it; a 310P has none. A task queue
    lets the host launch ahead of the device. Sums over ranks are the same each time, which HCCL on a 910B (A2) does not
    promise by itself (hicann/hccl, docs/zh/user_guide/hccl_env/HCCL_DETERMINISTIC.md, 09300b70): ranks that choose the
    experts of a mixture must see one sum. A 310P's HCCL knows no such setting. And torch is not to import torch_npu by
    itself: where driver or CANN are missing that fails inside `import torch`, before anything of ours could say what to
    do.
    """
    if not is_torch_npu_installed():
        return {}
    wanted = {AUTOLOAD: "0", TASK_QUEUE: "1"}
    if not has_310p_on_pci(pci=pci):
        wanted |= {ALLOCATOR: "expandable_segments:True", SUMS: "true"}
    return {name: value for name, value in wanted.items() if name not in environment}


def has_310p_on_pci(*, pci: Path = Path("/sys/bus/pci/devices")) -> bool:
    """False where it is part of the machine itself and shares its memory (root complex: Atlas 200I Pro), where there is
    none, and where nothing is known."""
    try:
        return any(
            ((device / "vendor").read_text().strip(), (device / "device").read_text().strip()) == _310P
            for device in pci.iterdir()
        )
    except OSError:
        return False  # nothing is known: torch_npu itself gives up what a device does not have


def visible_devices(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """The numbers in ASCEND_RT_VISIBLE_DEVICES; None where it is not set, which makes all NPUs visible.

    Raises ConfigError for what CANN would cut short or take for no device at all, without a word: it reads up to the
    first character that is neither a digit nor a comma, and wants the numbers ascending (torch_npu, npu/__init__.py).
    """
    value = environment.get(VISIBLE_DEVICES)
    if value is None:
        return None
    form = "it must be device numbers with commas between them, ascending, such as 0 or 0,1. Unset it to use any NPU."
    if not _NUMBERS.fullmatch(value):
        raise ConfigError(f"{VISIBLE_DEVICES} is {value!r}; {form}")
    numbers = tuple(int(number) for number in value.split(","))
    if list(numbers) != sorted(set(numbers)):
        raise ConfigError(f"{VISIBLE_DEVICES} is {value}; {form}")
    return numbers


def check_visible(numbers: tuple[int, ...] | None, *, found: int) -> None:
    """Raises ConfigError where CANN sees fewer NPUs than are named: it drops those that are not there."""
    if numbers is not None and found < len(numbers):
        raise ConfigError(
            f"{VISIBLE_DEVICES} is {','.join(map(str, numbers))}, but of these only {found} are there. In a container "
            "its own devices are counted from 0, whatever their numbers on the node: correct it, or unset it."
        )

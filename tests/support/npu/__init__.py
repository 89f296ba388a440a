"""An NPU for tests that have none: the vendor's operators, by its own schemas, in plain torch on the CPU.

    from tests.support.npu import npu_operators

    with npu_operators("910B") as machine:        # "310P", also_float32=True
        torch.ops.npu.npu_fused_infer_attention_score(query, key, value, …)
        torch.ops.atb._npu_paged_attention(…)     # ATB's are under `atb`, re-exported as torch_npu._npu_*

Tensors stay on the CPU: the operators are registered for CPU tensors, so the backend under test is chosen by name and
its device is "cpu". A device "npu" with `torch.npu`, memory that runs out and graphs is `device/`, for a process of its
own. What a call may look like is checked three times: by torch's dispatcher against the schema (out of
the wheel, `schemas.py`), by rules that each cite the vendor's sources (`rules.py`), and by a test against the wheel's
own meta functions. A refused call raises `NotSupportedByNpu`, which carries its rule. What is not emulated raises
NotImplementedError.

`npu_operators("310P", atb=Atb.CANN_9_0)` has torch_npu's operators and an ATB that is older than they are.

`machine.formats` says which tensors are in FRACTAL_NZ: those that `npu_format_cast(tensor, 29)` or `empty_with_format`
made, and all views of them.
"""

from tests.support.npu.machine import Atb, Chip, Machine
from tests.support.npu.operators import all_rules, npu_operators
from tests.support.npu.rules import NotSupportedByNpu, Rule
from tests.support.npu.wheel import WheelMissing

__all__ = ["Atb", "Chip", "Machine", "NotSupportedByNpu", "Rule", "WheelMissing", "all_rules", "npu_operators"]

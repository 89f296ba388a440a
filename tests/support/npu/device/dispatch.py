"""`NPUGraph.update` of torch_npu 2.13.0 (npu/graphs.py): attention operators of a capture are put into task groups by
themselves, and called again with other lengths before a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_UPDATED = ("npu_fused_infer_attention_score",)


@dataclass(slots=True)
class DispatchRecord:
    """One call whose host arguments can be set anew."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    handle: Any


class GraphDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph_dispatch_records: list[DispatchRecord] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__.partition(".")[0] not in _UPDATED:
            return func(*args, **kwargs)
        npu: Any = torch.npu  # type: ignore[attr-defined]
        stream = npu.current_stream()
        npu.graph_task_group_begin(stream)
        result = func(*args, **kwargs)
        handle = npu.graph_task_group_end(stream)
        frozen = {name: list(value) if isinstance(value, list) else value for name, value in kwargs.items()}
        self.graph_dispatch_records.append(DispatchRecord(func, args, frozen, handle))
        return result

    def update_capture_record(self, cpu_update_input: Sequence[dict[str, Any]]) -> None:
        (update,) = cpu_update_input  # one for all of them
        npu: Any = torch.npu  # type: ignore[attr-defined]
        stream = npu.current_stream()
        for record in self.graph_dispatch_records:
            record.kwargs |= {name: value for name, value in update.items() if name in record.kwargs}
            npu.graph_task_update_begin(stream, record.handle)
            record.operation(*record.args, **record.kwargs)
            npu.graph_task_update_end(stream)

"""`torch.npu` of the emulated device: what an engine asks a device for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.npu.device import graphs
from tests.support.npu.device.tensor import DeviceState
from tests.support.npu.machine import Chip

_NAMES = {Chip.ASCEND_910B: "Ascend910B3", Chip.ASCEND_310P: "Ascend310P3"}


class NpuStream:
    """Work is done at once: a stream orders nothing."""

    def __init__(self, device: object = None, priority: int = 0) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: NpuStream) -> None: ...

    def wait_event(self, event: NpuEvent) -> None: ...


class NpuEvent:
    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self, stream: NpuStream | None = None) -> None: ...

    def wait(self, stream: NpuStream | None = None) -> None: ...

    def reset(self, stream: NpuStream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


@dataclass
class NpuRuntime:
    """All of torch.npu that is emulated: what is not fails as a missing attribute."""

    state: DeviceState
    chip: Chip
    count: int
    _current: int = 0
    _stream: NpuStream = field(default_factory=NpuStream)

    NPUGraph = graphs.NPUGraph
    Stream = NpuStream
    Event = NpuEvent
    ExternalEvent = NpuEvent
    OutOfMemoryError = torch.OutOfMemoryError

    def is_available(self) -> bool:
        return self.count > 0

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: Any) -> None:
        self._current = self._index(device)

    def get_device_name(self, device: Any = None) -> str:
        self._index(device)
        return _NAMES[self.chip]

    def synchronize(self, device: Any = None) -> None:
        self._index(device)
        if isinstance(self.state.capture, graphs.NPUGraph):
            self.state.capture.refuse("synchronize")

    def set_compile_mode(self, jit_compile: bool = False) -> None:
        self.state.jit_compile = jit_compile

    def manual_seed_all(self, seed: int) -> None: ...

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        self._index(device)
        return self.state.memory.free, self.state.memory.total

    def memory_allocated(self, device: Any = None) -> int:
        self._index(device)
        return self.state.memory.allocated

    def memory_reserved(self, device: Any = None) -> int:
        return self.memory_allocated(device)

    def max_memory_allocated(self, device: Any = None) -> int:
        self._index(device)
        return self.state.memory.peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._index(device)
        self.state.memory.peak = self.state.memory.allocated

    def empty_cache(self) -> None: ...

    def current_stream(self, device: Any = None) -> NpuStream:
        return self._stream

    @contextmanager
    def stream(self, stream: NpuStream) -> Iterator[None]:
        yield

    @contextmanager
    def graph(
        self, npu_graph: graphs.NPUGraph, pool: object = None, stream: NpuStream | None = None, **_: Any
    ) -> Iterator[None]:
        npu_graph.capture_begin(pool)
        try:
            yield
        finally:
            npu_graph.capture_end()

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 0)

    def is_current_stream_capturing(self) -> bool:
        return self.state.capture is not None

    def graph_task_group_begin(self, stream: NpuStream) -> None:
        self._captured().begin_group()

    def graph_task_group_end(self, stream: NpuStream) -> graphs.TaskGroup:
        return self._captured().end_group()

    def graph_task_update_begin(self, stream: NpuStream, handle: graphs.TaskGroup) -> None:
        self.state.update = graphs.GroupUpdate(handle)

    def graph_task_update_end(self, stream: NpuStream) -> None:
        update, self.state.update = self.state.update, None
        if not isinstance(update, graphs.GroupUpdate):
            raise RuntimeError("graph_task_update_end without graph_task_update_begin")
        update.finish()

    def _captured(self) -> graphs.NPUGraph:
        if not isinstance(self.state.capture, graphs.NPUGraph):
            raise RuntimeError("a task group is part of a graph that is being captured")
        return self.state.capture

    def _index(self, device: Any) -> int:
        index = (
            self._current if device is None else device if isinstance(device, int) else torch.device(device).index or 0
        )
        if not 0 <= index < self.count:
            raise RuntimeError(f"Invalid device ID: {index}, there are {self.count} NPUs")
        return index

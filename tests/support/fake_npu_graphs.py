"""`torch.npu`'s graphs on a CPU: what a capture launches is recorded, operator by operator, and a replay does it again.

As on the device a graph has fixed addresses (each operator writes where it wrote when it was captured) and frozen
host arguments, among them the lengths of attention, until `update` sets them; what would wait for the device cannot be
captured. The names and the order of calls are those of torch_npu 2.13.0, npu/graphs.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.npu.device.graphs import invalidated, refuse_task_queue_2

ATTENTION = "npu_fused_infer_attention_score"
_WAITS_FOR_THE_DEVICE = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique")


@dataclass(slots=True)
class Record:
    """One operator of a graph."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Any]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """The records of a capture; of them those of attention are what torch_npu keeps for `update`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[Record] = []
        self.graph_dispatch_records: list[Record] = []
        self.invalidated = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in _WAITS_FOR_THE_DEVICE:
            self.invalidated = True
            raise RuntimeError(f"{name}: synchronizing is not permitted during NPU graph capture")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        frozen = {key: copy.copy(value) if isinstance(value, list) else value for key, value in kwargs.items()}
        record = Record(func, args, frozen, tree_leaves(result))
        self.records.append(record)
        if name == ATTENTION:
            self.graph_dispatch_records.append(record)
        return result


class FakeNPUGraph:
    def __init__(self, device: FakeNPU) -> None:
        self.graph_dispatch_mode = device.new_recorder()
        self.auto_dispatch_capture = False
        self._device = device

    def capture_begin(self, pool: object = None) -> None:
        assert pool is self._device.pool
        refuse_task_queue_2()
        self._device.captures += 1
        if error := self._device.capture_error(self._device.captures):
            raise error
        self._device.capturing = True

    def capture_end(self) -> None:
        self._device.capturing = False
        if self.graph_dispatch_mode.invalidated:
            raise invalidated()

    def update(self, cpu_update_input: list[dict[str, list[int]]]) -> None:
        assert self.auto_dispatch_capture, "The current graph configuration does not support update"
        (update,) = cpu_update_input
        assert not self._device.running, "a task of the last replay that has yet to run would see the new lengths"
        self._device.updates.append(update)
        if self._device.forgets_updates:
            return
        for record in self.graph_dispatch_mode.graph_dispatch_records:
            record.kwargs.update({key: value for key, value in update.items() if key in record.kwargs})

    def replay(self) -> None:
        self._device.replays += 1
        self._device.running = True
        for record in self.graph_dispatch_mode.records:
            new = tree_leaves(record.function(*record.args, **record.kwargs))
            for old, value in zip(record.results, new, strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != value.data_ptr():
                    old.copy_(value)


@dataclass
class FakeNPU:
    """The parts of the module torch.npu that capturing needs, and what was done with them."""

    capture_error: Callable[[int], Exception | None] = lambda _number: None
    """Of the n-th capture, from 1."""
    forgets_updates: bool = False
    new_recorder: Callable[[], Recorder] = Recorder
    captures: int = 0
    replays: int = 0
    capturing: bool = False
    running: bool = False
    """A replay has been launched, and nobody has waited for it."""
    updates: list[dict[str, list[int]]] = field(default_factory=list)
    pool: object = field(default_factory=object)
    streams: list[object] = field(default_factory=list)
    """Those that are current, innermost last."""

    def NPUGraph(self) -> FakeNPUGraph:  # noqa: N802  (torch_npu's name)
        return FakeNPUGraph(self)

    def graph_pool_handle(self) -> object:
        return self.pool

    def Stream(self) -> object:  # noqa: N802  (torch_npu's name)
        return object()

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.pop()

    def current_stream(self) -> Any:
        return SimpleNamespace(synchronize=self.synchronize)

    def synchronize(self) -> None:
        assert not self.capturing, "synchronizing is not permitted during NPU graph capture"
        self.running = False

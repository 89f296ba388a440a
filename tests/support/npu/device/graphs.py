"""Captured graphs: kernels with the addresses they were captured with, replayed in order.

While a graph is captured nothing is computed: results are NaN (or 0) until the first replay, and what is written in
place stays as it was. Views are made by the host and are not part of a graph.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.npu.device.dispatch import GraphDispatchMode
from tests.support.npu.device.tensor import NpuTensor, raw_of, run, target_device

# They wait for the device, or bring values to the host.
_WAITING = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal")


def refuse_task_queue_2() -> None:
    """torch_npu, csrc/core/npu/NPUGraph.cpp, NPUGraph::capture_begin (94c0533ba, of 2.13.0); that a launch that blocks
    makes it 0 is OptionsManager::GetTaskQueueEnable."""
    if os.environ.get("ASCEND_LAUNCH_BLOCKING") != "1" and os.environ.get("TASK_QUEUE_ENABLE") == "2":
        raise RuntimeError(
            "Do not support TASK_QUEUE_ENABLE = 2 during NPU graph capture, please export TASK_QUEUE_ENABLE=1/0.\n"
            "[ERROR] ERR00007 PTA feature not supported"
        )


def invalidated() -> RuntimeError:
    """Of a capture that met what it does not permit: its end is an error as well (hicann/runtime, 681ef7610,
    rt_error_codes.h, ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED; torch_npu clears its own state before it says so)."""
    return RuntimeError(
        "capture_end:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:373 NPU function error: endCaptureErr, "
        "error code is 507903\n[Error]: The capture status is invalidated."
    )


@dataclass
class _Task:
    operation: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: list[torch.Tensor]
    """Raw tensors that replay writes to; arguments written in place are not among them."""


@dataclass
class TaskGroup:
    """Tasks between graph_task_group_begin and graph_task_group_end: what an update may replace."""

    tasks: list[_Task] = field(default_factory=list)


class NPUGraph:
    """As torch.npu.NPUGraph: captured once within `torch.npu.graph`, replayed as often as wanted."""

    def __init__(self) -> None:
        self.graph_dispatch_mode = GraphDispatchMode()
        self.auto_dispatch_capture = False
        self._tasks: list[_Task] = []
        self._group: TaskGroup | None = None
        self._updated: list[_Task] | None = None
        self._invalidated = False

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        refuse_task_queue_2()
        if NpuTensor.state.capture is not None:
            raise RuntimeError("a graph is being captured already")
        NpuTensor.state.capture = self

    def capture_end(self) -> None:
        NpuTensor.state.capture = None
        if self._invalidated:
            raise invalidated()

    def replay(self) -> None:
        for task in self._tasks:
            results = run(task.operation, task.args, task.kwargs)
            fresh = [raw_of(leaf) for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
            written = _written(task.operation, task.args, task.kwargs)
            fresh = [leaf for leaf in fresh if not any(leaf is raw_of(target) for target in written)]
            for target, source in zip(task.results, fresh, strict=True):
                target.copy_(source)

    def update(self, cpu_update_input: Sequence[dict[str, Any]]) -> None:
        if not self.auto_dispatch_capture:
            raise RuntimeError("The current graph configuration does not support update")
        self.graph_dispatch_mode.update_capture_record(cpu_update_input)

    def reset(self) -> None:
        self._tasks.clear()

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def refuse(self, waiting: str) -> None:
        self._invalidated = True
        raise RuntimeError(f"{waiting} waits for the device, which is not permitted while a graph is captured")

    def begin_group(self) -> None:
        self._group = TaskGroup()

    def end_group(self) -> TaskGroup:
        if self._group is None:
            raise RuntimeError("graph_task_group_end without graph_task_group_begin")
        group, self._group = self._group, None
        return group

    def record(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = operation._schema.name.removeprefix("aten::")
        leaves = tree_leaves((args, kwargs))
        brings_home = target_device(args, kwargs) == "cpu"
        brings_home |= name == "copy_" and not isinstance(args[0], NpuTensor)
        if name in _WAITING or brings_home:
            self.refuse(name)
        written = _written(operation, args, kwargs)
        copies = _clones(operation, args, kwargs)
        tried = run(*_replaced(operation, args, kwargs, copies))
        storages = {leaf.raw.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, NpuTensor)}
        originals = {id(copy): target for target in written for copy in [copies.get(id(target))] if copy is not None}
        if not written and _is_view(tried, storages):
            return tried
        task = _Task(operation, args, kwargs, [])

        def placed(leaf: Any) -> Any:
            if id(leaf) in originals:
                return originals[id(leaf)]
            if isinstance(leaf, NpuTensor):
                leaf.raw.fill_(float("nan") if leaf.dtype.is_floating_point else 0)
                task.results.append(leaf.raw)
            return leaf

        results = tree_map(placed, tried)
        self._tasks.append(task)
        if self._group is not None:
            self._group.tasks.append(task)
        return results


class GroupUpdate:
    """Between graph_task_update_begin and graph_task_update_end: the calls of one group, again, with new arguments."""

    def __init__(self, group: TaskGroup) -> None:
        self._waiting = list(group.tasks)

    def record(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self._waiting:
            raise RuntimeError(f"{operation} updates a task group that has no further task")
        task = self._waiting[0]
        if task.operation is not operation:
            raise RuntimeError(f"{operation} cannot update a captured {task.operation}")
        del self._waiting[0]
        task.args, task.kwargs = args, kwargs
        return run(*_replaced(operation, args, kwargs, _clones(operation, args, kwargs)))

    def finish(self) -> None:
        if self._waiting:
            raise RuntimeError(f"{len(self._waiting)} tasks of the group were not updated")


def _clones(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[int, NpuTensor]:
    written = _written(operation, args, kwargs)
    return {id(target): NpuTensor(target.raw.clone()) for target in written if isinstance(target, NpuTensor)}


def _written(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the schema says are written to."""
    marked = [a.name for a in operation._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    names = [argument.name for argument in operation._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    return [leaf for name in marked if name in named for leaf in tree_leaves(named[name]) if leaf is not None]


def _replaced(
    operation: Any, args: Sequence[Any], kwargs: dict[str, Any], copies: dict[int, NpuTensor]
) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    def swap(leaf: Any) -> Any:
        return copies.get(id(leaf), leaf)

    return operation, tree_map(swap, args), tree_map(swap, kwargs)


def _is_view(results: Any, storages: set[int]) -> bool:
    tensors = [leaf for leaf in tree_leaves(results) if isinstance(leaf, NpuTensor)]
    return bool(tensors) and all(leaf.raw.untyped_storage()._cdata in storages for leaf in tensors)

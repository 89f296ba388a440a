"""Tensors of the emulated device, and what happens to each operation on them.

`raw` is the CPU tensor that has a device tensor's values. An operation runs on the raw tensors; what comes out is a
tensor of the device again, the same object where the operation wrote in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.npu.device.memory import DeviceMemory
from tests.support.npu.device.torch_rules import COMPILED_BEFOREHAND, check_operation
from tests.support.npu.machine import Chip, Formats


class Recorder(Protocol):
    """A capture that is under way."""

    def record(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any: ...


@dataclass
class DeviceState:
    memory: DeviceMemory
    chip: Chip
    capture: Recorder | None = None
    update: Recorder | None = None
    formats: Formats = field(default_factory=Formats)
    jit_compile: bool = False


class NpuTensor(torch.Tensor):
    state: DeviceState
    """One for the process: `install` sets it."""
    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> NpuTensor:
        # Never an inference tensor, also in inference mode: a view of a plain tensor must be one.
        with torch.inference_mode(False):
            made: NpuTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                raw.size(),
                strides=raw.stride(),
                storage_offset=raw.storage_offset(),
                dtype=raw.dtype,
                layout=raw.layout,
                device=torch.device("npu", 0),
                requires_grad=False,
            )
        made.raw = raw
        cls.state.memory.hold(made, raw)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own subclasses

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without func
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def tolist(self) -> Any:
        """torch refuses it to subclasses; a device's tensor copies its values to the host."""
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]  # the superclass's further argument is its own affair
        return f"{self.raw!r} on npu:0"


def dispatch(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Carries out, records or refuses one operation that has to do with the device."""
    state = NpuTensor.state
    _check_devices(operation, args, kwargs)
    recorder = state.update or state.capture
    if recorder is not None:
        return recorder.record(operation, args, kwargs)
    return run(operation, args, kwargs)


def run(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operation on raw tensors; its results are of the device that it was asked for."""
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    state = NpuTensor.state
    COMPILED_BEFOREHAND.require(not state.jit_compile, f"{operation}")
    check_operation(state.chip, state.formats, operation, [raw_of(tensor) for tensor in tensors])
    stays = target_device(args, kwargs) in (None, "npu")
    known = {id(raw_of(tensor)): tensor for tensor in tensors}
    result = operation(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))
    resized = [tensor for tensor in tensors if raw_of(tensor).shape != tensor.shape]
    if resized:
        raise NotImplementedError(f"{operation} resized a tensor of the device from {list(resized[0].shape)}")

    def wrapped(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if stays:
            return known[id(leaf)] if id(leaf) in known else NpuTensor(leaf)
        return leaf.clone() if id(leaf) in known else leaf

    return tree_map(wrapped, result)


def target_device(args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """The type of the device that an operation names, if it names one."""
    named = [leaf.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)]
    return named[0] if named else None


def raw_of(leaf: Any) -> Any:
    return leaf.raw if isinstance(leaf, NpuTensor) else leaf


def _on_host(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else raw_of(leaf)


# Between devices, and indices, which every backend takes from the CPU. ATB reads lengths on the host.
_MAY_MIX = ("copy_", "_copy_from", "_to_copy", "to", "index", "index_put_", "_index_put_impl_", "_unsafe_index")
_HOST_ARGUMENTS = ("context_lens", "seq_len")


def _check_devices(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if operation._schema.name.removeprefix("aten::") in _MAY_MIX:
        return
    for name, value in _named(operation, args, kwargs):
        for leaf in tree_leaves(value):
            foreign = isinstance(leaf, torch.Tensor) and not isinstance(leaf, NpuTensor) and leaf.dim() > 0
            if foreign and name not in _HOST_ARGUMENTS:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, npu:0 and "
                    f"{leaf.device}! (argument {name} of {operation})"
                )


def _named(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    names = [argument.name for argument in operation._schema.arguments]
    yield from zip(names, args, strict=False)
    yield from kwargs.items()


def factories(memory: DeviceMemory) -> dict[str, Callable[..., torch.Tensor]]:
    """What makes tensors out of nothing on the device; all others are made of these."""

    def empty(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: object) -> torch.Tensor:
        return _made(memory, torch.empty(size, dtype=dtype, device="meta"))

    def empty_strided(
        size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **_: object
    ) -> torch.Tensor:
        return _made(memory, torch.empty_strided(size, stride, dtype=dtype, device="meta"))

    def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        raw_of(target).copy_(raw_of(source))
        return target

    made: dict[str, Callable[..., torch.Tensor]] = {
        "empty.memory_format": empty,
        "empty_strided": empty_strided,
        "_copy_from": copy_from,
    }
    # Of these torch makes an empty tensor that the kernel resizes, which a device tensor cannot follow.
    return made | {name: functools.partial(_on_cpu, name) for name in _RESIZED}


_RESIZED = ("arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m")


def _on_cpu(name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    base, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, base), overload or "default")
    return NpuTensor(operation(*args, **kwargs | {"device": torch.device("cpu")}))


def _made(memory: DeviceMemory, shape: torch.Tensor) -> torch.Tensor:
    """Checks before it allocates: the machine under the emulation may have less memory than the device pretends."""
    memory.check(shape.untyped_storage().nbytes())
    return NpuTensor(torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device="cpu"))

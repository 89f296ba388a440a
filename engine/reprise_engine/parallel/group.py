"""The process group of the ranks, with the few collectives that they need."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from reprise_engine.errors import ConfigError, RankDied
from reprise_engine.parallel.shard import Place

_MEETING_SECONDS = 120
"""All ranks are there before they meet, so this is for a machine that is very busy."""
_LOOPBACK = "127.0.0.1"
_DIST: Any = dist
"""Its stubs leave out most of what a group of one's own is made with."""


class LostRank(RankDied):
    """Another rank did not come to a sum: it has ended, or has lost one itself."""


class Group(Protocol):
    """Every rank calls the same collectives in the same order."""

    @property
    def place(self) -> Place: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, the same to the last bit on each of them. May write to `x`.

        Raises LostRank.
        """
        ...

    def barrier(self) -> None:
        """Returns when all ranks have come here, and their devices have done what they were told before."""
        ...

    def close(self) -> None: ...


class GlooGroup:
    """On CPUs, by torch's gloo over the loopback interface; waiting for others costs no processor time.

    Not torch's default group: several engines, and whatever else uses torch.distributed, may live in one process.
    """

    def __init__(self, place: Place, meeting_point: Path) -> None:
        self._place = place
        options = _DIST.ProcessGroupGloo._Options()
        options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = timedelta(seconds=_MEETING_SECONDS)
        store = _DIST.FileStore(str(meeting_point), place.size)
        self._group = _DIST.ProcessGroupGloo(store, place.rank, place.size, options)

    @property
    def place(self) -> Place:
        return self._place

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """In the order of the ranks. An all_reduce would add in an order that depends on where an element lies in the
        tensor, so the KV of a token would depend on what else is in its step."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self._place.size)]
        try:
            self._group.allgather([parts], [x]).wait()
        except RuntimeError as error:
            raise LostRank(f"a sum over the ranks failed: {error}") from error
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def barrier(self) -> None:
        self.sum(torch.zeros(1))

    def close(self) -> None:
        self._group.abort()


class HcclGroup:
    """On NPUs, by torch_npu's HCCL, as the default group of torch.distributed: the documented way to it."""

    def __init__(self, place: Place, meeting_point: Path, device: torch.device) -> None:
        if dist.is_initialized():
            raise ConfigError(
                "--tensor-parallel-size is above 1, but this process uses torch.distributed already, for another "
                "engine or for something else; run this engine in a process of its own."
            )
        self._place, self._device = place, device
        store = _DIST.FileStore(str(meeting_point), place.size)
        dist.init_process_group("hccl", store=store, rank=place.rank, world_size=place.size)

    @property
    def place(self) -> Place:
        return self._place

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            raise LostRank(f"a sum over the ranks failed: {error}") from error
        return x

    def barrier(self) -> None:
        self.sum(torch.zeros(1, device=self._device)).item()  # reading it waits for the device

    def close(self) -> None:
        dist.destroy_process_group()


def open_group(place: Place, meeting_point: Path, device: torch.device) -> Group:
    """Meets the other ranks at a path that did not exist before, in a folder of this user's alone. Raises ConfigError
    or RuntimeError where they do not come."""
    if device.type == "cpu":
        return GlooGroup(place, meeting_point)
    return HcclGroup(place, meeting_point, device)

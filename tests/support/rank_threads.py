"""The ranks of a model as threads of one process: what they compute together, without processes and sockets."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch

from reprise_engine.parallel.group import Group
from reprise_engine.parallel.shard import Place

Result = TypeVar("Result")

_PATIENCE = 60.0


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size, timeout=_PATIENCE)
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size


class ThreadGroup:
    """Sums in the dtype of the parts, in the order of the ranks, as GlooGroup does."""

    def __init__(self, place: Place, meeting: _Meeting) -> None:
        self._place, self._meeting = place, meeting

    @property
    def place(self) -> Place:
        return self._place

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self._meeting.parts[self._place.rank] = x
        self._meeting.barrier.wait()
        total = self._meeting.parts[0].clone()
        for part in self._meeting.parts[1:]:
            total += part
        self._meeting.barrier.wait()
        return total

    def barrier(self) -> None:
        self._meeting.barrier.wait()

    def close(self) -> None:
        self._meeting.barrier.abort()


def on_ranks(size: int, compute: Callable[[Group], Result]) -> list[Result]:
    """What `compute` returns on each rank, in their order. Raises what one of them raised."""
    meeting = _Meeting(size)

    def run(rank: int) -> Result:
        group = ThreadGroup(Place(rank=rank, size=size), meeting)
        try:
            return compute(group)
        except BaseException:
            group.close()  # the others wait for it
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in running if (error := future.exception()) is not None]
    # A broken barrier is what the others see of it.
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [future.result() for future in running]

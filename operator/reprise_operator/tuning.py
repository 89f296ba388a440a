"""Which share of the device's memory the engine gets, after what has been seen of it running out. Pure.

    inputs, status.memory as last written → `carried`: the present state
    state, ends by lack of memory         → `lowered`: the same, or one step lower

A step is STEP of the device. What is remembered is in status.memory, which is written before the Deployment: whoever
looks next, a new process too, finds the step taken. Nothing is raised again until an input changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reprise_operator.children.accelerator import device_count, profile_of, resource_name
from reprise_operator.children.memory import MemoryPlan, plan_memory
from reprise_operator.children.pod import engine_image
from reprise_operator.children.slices import memory_share, within_slice
from reprise_operator.naming import digest
from reprise_operator.resource import InferenceService
from reprise_operator.settings import Settings

STEP = 0.05
"""Share of the device that one step gives up. On 64 GiB that is more than the runtime's own buffers vary by; smaller
steps would be more of them, and each restarts the pods."""
DEFAULT_DEPTH = 0.20
"""Where spec.memory.floor is unset, the floor is so far below the first value: four steps."""
LEAST_FLOOR = 0.05
"""And never below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEnd:
    """A container that ended because memory ran out, and would have had more to spare with a smaller share."""

    pod_uid: str
    container_id: str
    at: str
    """RFC 3339."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryState:
    """What status.memory remembers, and what follows from it."""

    inputs_hash: str
    first: MemoryPlan
    """Before any step."""
    auto_tune: bool
    floor: float
    steps: int = 0
    last: MemoryEnd | None = None
    """The last end that counted."""

    @property
    def effective(self) -> float:
        """What the engine is told."""
        if not self.steps:
            return self.first.effective
        return max(self.floor, round(self._start - self.steps * STEP, 4))

    @property
    def most_steps(self) -> int:
        """After so many the floor is reached; the last may be a small one."""
        return math.ceil((self._start - self.floor) / STEP - 1e-9)

    @property
    def _start(self) -> float:
        """Where steps are counted from: rounded as they are, and never up, so that none of them comes to nothing."""
        return min(self.first.effective, round(self.first.effective, 4))

    @property
    def can_be_lowered(self) -> bool:
        return self.auto_tune and self.steps < self.most_steps

    @property
    def is_at_floor(self) -> bool:
        """Whether memory has run out and nothing more may be given up."""
        return self.auto_tune and self.last is not None and self.steps >= self.most_steps

    @property
    def plan(self) -> MemoryPlan:
        """What the children are built with."""
        if not self.steps:
            return self.first
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        reason = f"lowered from {self.first.effective:g} in {steps}, since pods ran out of memory; {self.first.reason}"
        return MemoryPlan(requested=self.first.requested, effective=self.effective, reason=reason)


def carried(service: InferenceService, settings: Settings, previous: Mapping[str, Any]) -> MemoryState:
    """The state before this pass has looked at any pod. `previous` is status.memory as last written.

    Steps are kept while the inputs are the same, whatever else of the spec changes.
    """
    asked, first = service.spec.memory, within_slice(plan_memory(service), service)
    default = max(LEAST_FLOOR, first.effective - DEFAULT_DEPTH)
    floor = min(first.effective, round(default, 4) if asked.floor is None else asked.floor)
    state = MemoryState(inputs_hash=inputs_hash(service, settings), first=first, auto_tune=asked.auto_tune, floor=floor)
    if previous.get("inputsHash") != state.inputs_hash:
        return state
    return replace(state, steps=_steps(previous.get("steps"), state), last=_last(previous.get("lastOutOfMemory")))


def lowered(state: MemoryState, ends: Sequence[MemoryEnd]) -> MemoryState:
    """One step lower when `ends`, all of pods that ran with `state`, hold one that has not been counted.

    However many they are it is one step: the pods of the next revision say whether it was enough.
    """
    fresh = [end for end in ends if not _is_same(end, state.last)]
    if not fresh:
        return state
    newest = max(fresh, key=lambda end: (end.at, end.pod_uid, end.container_id))
    if state.can_be_lowered:
        return replace(state, steps=state.steps + 1, last=newest)
    if state.auto_tune and state.last is None:
        return replace(state, last=newest)  # nothing to give up from the start: remembered once, to say so
    return state


def memory_status(state: MemoryState) -> dict[str, Any]:
    """status.memory, but for what the present pods say."""
    plan = state.plan
    status: dict[str, Any] = {
        "effective": plan.effective,
        "reason": plan.reason,
        "inputsHash": state.inputs_hash,
        "steps": state.steps,
    }
    if plan.requested is not None:
        status["requested"] = plan.requested
    if state.last is not None:
        last = state.last
        status["lastOutOfMemory"] = {"podUID": last.pod_uid, "containerID": last.container_id, "at": last.at}
    return status


_NO_DEVICE_MEMORY = frozenset({"hash_algorithm", "isolation", "isolation_secret_ref", "persistence", "warmup"})
"""Fields of spec.prefixCaching that take no memory of the engine's share: names, salts, files, and prompts that only
fill blocks which are there anyway."""


def inputs_hash(service: InferenceService, settings: Settings) -> str:
    """Digest of all that decides how much memory the engine needs and has.

    Only what is set counts, so that a field of a later release does not change it.
    """
    spec = service.spec

    def given(part: Any, *, exclude: frozenset[str] = frozenset()) -> Any:
        return part.model_dump(mode="json", exclude_defaults=True, exclude=set(exclude))

    accelerator: dict[str, Any] = {
        "profile": spec.accelerator.profile,
        "resource": resource_name(service),
        "count": device_count(service),
    }
    share = memory_share(service)
    if share is not None:
        accelerator["part"] = share
    if not profile_of(service).is_npu:
        # The container's own memory is the device's.
        accelerator["memory"] = str(spec.runtime.resources.limits.get("memory"))
    model = spec.model.model_dump(mode="json", exclude_defaults=True, include={"uri", "revision"})
    return digest(
        {
            "model": model,
            "maxModelLen": spec.model.max_model_len,
            "dtype": spec.model.dtype,
            "memory": given(spec.memory),
            "cache": given(spec.prefix_caching, exclude=_NO_DEVICE_MEMORY),
            "accelerator": accelerator,
            "runtime": spec.runtime.name,
            "image": engine_image(service, settings),
            "extraArgs": spec.runtime.extra_args,
            "env": [given(variable) for variable in spec.runtime.env],
        }
    )


def _is_same(end: MemoryEnd, last: MemoryEnd | None) -> bool:
    return last is not None and (end.pod_uid, end.container_id) == (last.pod_uid, last.container_id)


def _steps(written: object, state: MemoryState) -> int:
    """As far as the floor allows: a floor is an input, so more can only be somebody's edit of the status."""
    return min(written, state.most_steps) if isinstance(written, int) and written > 0 else 0


def _last(written: object) -> MemoryEnd | None:
    if not isinstance(written, Mapping):
        return None
    pod, container, at = (written.get(key) for key in ("podUID", "containerID", "at"))
    if not isinstance(pod, str) or not isinstance(container, str) or not isinstance(at, str):
        return None
    return MemoryEnd(pod_uid=pod, container_id=container, at=at)

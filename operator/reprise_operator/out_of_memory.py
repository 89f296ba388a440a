"""Did a container end because memory ran out, of which memory, and would a smaller share have helped? Pure.

Read are the kubelet's reason, the container's last words, and, of a runtime that keeps its cause out of them, the end
of its log. Ours writes one line for this very purpose: `OutOfMemory: memory=npu|host phase=…: …` (docs/memory.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from reprise_operator.children.accelerator import profile_of
from reprise_operator.children.pod import CONTAINER
from reprise_operator.observed import Observed, Termination
from reprise_operator.plan import Plan
from reprise_operator.resource import InferenceService
from reprise_operator.tuning import MemoryEnd
from reprise_operator.workloads import workload_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """`memory` ran out. `too_small_a_share`: it was the budget of --gpu-memory-utilization, and not the device."""

    memory: Literal["device", "host"]
    share_helps: bool
    """Whether an engine that is told a smaller share would have had room."""
    too_small_a_share: bool = False
    words: str = ""
    """The line that tells."""


# Our engine's own line; also in the end of its log, where the kubelet found no last words.
_OURS = re.compile(r"\bmemory=(?P<memory>npu|host) phase=(?P<phase>[a-z-]+): .*")
# The share decides over what is taken in these phases. Weights and the profiling run take what they need.
_DECIDED_BY_SHARE = frozenset({"kv-cache", "running"})
_CHILD_KILLED = re.compile(r"EngineDead: The engine process was killed by SIGKILL.*")
# What torch_npu's allocators say (and their error ERR00006), the CANN runtime (EL0004, 207001, 207018), HCCL (EI0011),
# and vLLM where less of the device is free than the share it was told.
_DEVICE = re.compile(
    r".*(NPU out of memory|Allocator tried to allocate [^\n]{0,40}\(NPU|ERR00006\b|\bEL0004\b"
    r"|error code is 2070(01|18)\b|Failed to allocate resource\[DeviceMemory\]|\bEI0011\b"
    r"|Free memory on [^\n]{0,200} is less than desired).*"
)
# CANN's, of the host: the code next to it is that of a lack of the device's.
_HOST_BY_CANN = re.compile(r".*\bEE1013\b.*")
# vLLM's arithmetic: the share less weights and activations leaves nothing. A smaller one leaves less.
_SHARE_TOO_SMALL = re.compile(r".*(Available KV cache memory: -|No available memory for the cache blocks).*")
# How far our engine had come when it was killed: until the pool is allocated the share has decided nothing.
_LOADING = re.compile(r"INFO (Loading weights|Reading the model's configuration)")
_SIZED = re.compile(r"INFO (Sizing|Allocating) the KV cache| serves ")


def shortage(service: InferenceService, *, reason: str | None, words: str, log: str = "") -> Shortage | None:
    """`reason` is the kubelet's, `words` the termination message. None: it ended for something else, or well."""
    on_cpu = not profile_of(service).is_npu
    # Without a limit the share is of the machine, and the engine takes what is free: then others used it up.
    own_memory = on_cpu and "memory" in service.spec.runtime.resources.limits
    if reason == "OOMKilled":
        killed_early = _LOADING.search(words) is not None and _SIZED.search(words) is None
        return Shortage(memory="host", share_helps=own_memory and not killed_early)
    for text in (words, log):
        if found := _OURS.search(text):
            decided = found["phase"] in _DECIDED_BY_SHARE
            if found["memory"] == "npu":
                return Shortage(memory="device", share_helps=decided, words=found[0])
            return Shortage(memory="host", share_helps=own_memory and decided, words=found[0])
        if found := _CHILD_KILLED.search(text):
            return Shortage(memory="host", share_helps=own_memory, words=found[0])
        if found := _HOST_BY_CANN.search(text):
            return Shortage(memory="host", share_helps=own_memory, words=found[0].strip())
        if found := _DEVICE.search(text):
            return Shortage(memory="device", share_helps=True, words=found[0].strip())
        if found := _SHARE_TOO_SMALL.search(text):
            return Shortage(memory="device", share_helps=False, too_small_a_share=True, words=found[0].strip())
    return None


def memory_ends(plan: Plan, observed: Observed) -> tuple[MemoryEnd, ...]:
    """The ends by lack of memory that say something about the Plan's present share, and that a smaller one would cure.

    Only pods of the workload's present template count, and only where that was applied from this very Plan: what ran
    with another share, or with other inputs, has been answered already.
    """
    applied = workload_of(plan, observed)
    if applied is None or not applied.owned or observed.template_hash is None:
        return ()
    if not applied.is_applied_from(plan.workload):
        return ()
    return tuple(
        MemoryEnd(pod_uid=pod.uid, container_id=end.container_id, at=end.finished_at)
        for pod in observed.pods
        if pod.template_hash == observed.template_hash
        for end in pod.terminations
        if end.container == CONTAINER and end.exit_code != 0 and _is_curable(plan.service, end)
    )


def _is_curable(service: InferenceService, end: Termination) -> bool:
    found = shortage(service, reason=end.reason, words=end.message, log=end.log)
    return found is not None and found.share_helps

"""The status of a pod as a kubelet writes it, computed from the states of its containers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.node_client import Manifest
from tests.support.node_process import timestamp


@dataclass(slots=True, kw_only=True)
class ContainerState:
    """What is known of one container now. `state` and `last_state` are as in the API ({"running": {…}} and so on)."""

    name: str
    image: str
    init: bool = False
    state: Manifest = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last_state: Manifest = field(default_factory=dict)
    restart_count: int = 0
    ready: bool = False
    started: bool = False
    container_id: str = ""

    @property
    def ended_well(self) -> bool:
        return bool("terminated" in self.state and self.state["terminated"]["exitCode"] == 0)

    def to_api(self) -> Manifest:
        return {
            "name": self.name,
            "image": self.image,
            "imageID": f"process://{self.image}" if self.container_id else "",
            "containerID": self.container_id,
            "state": self.state,
            "lastState": self.last_state,
            "restartCount": self.restart_count,
            "ready": self.ready,
            "started": self.started,
        }


def pod_phase(containers: Sequence[ContainerState], inits: Sequence[ContainerState], *, restart_policy: str) -> str:
    """Pending, Running, Succeeded or Failed, by the rules of the pod life cycle."""
    if restart_policy == "Never" and any("terminated" in each.state and not each.ended_well for each in inits):
        return "Failed"
    if not all(each.ended_well for each in inits):
        return "Pending"
    if restart_policy != "Always" and all("terminated" in each.state for each in containers):
        if all(each.ended_well for each in containers):
            return "Succeeded"
        if restart_policy == "Never":
            return "Failed"
    began = any("waiting" not in each.state or each.last_state for each in containers)
    return "Running" if began else "Pending"


def pod_status(
    *,
    containers: Sequence[ContainerState],
    inits: Sequence[ContainerState],
    previous: Manifest,
    restart_policy: str,
    pod_ip: str,
    host_ip: str,
    start_time: str,
) -> Manifest:
    """The whole status. `previous` keeps the transition times of conditions that did not change."""
    phase = pod_phase(containers, inits, restart_policy=restart_policy)
    initialized = all(each.ended_well for each in inits)
    unready = [each.name for each in containers if not each.ready]
    if phase == "Succeeded":
        lacking = {"reason": "PodCompleted"}
    elif unready:
        lacking = {
            "reason": "ContainersNotReady",
            "message": f"containers with unready status: [{' '.join(unready)}]",
        }
    else:
        lacking = {}
    incomplete = {
        "reason": "ContainersNotInitialized",
        "message": f"containers with incomplete status: [{' '.join(e.name for e in inits if not e.ended_well)}]",
    }
    wanted: list[tuple[str, bool, Manifest]] = [
        ("PodReadyToStartContainers", True, {}),
        ("Initialized", initialized, {} if initialized else incomplete),
        ("Ready", not lacking, lacking),
        ("ContainersReady", not lacking, lacking),
        ("PodScheduled", True, {}),
    ]
    before = {condition["type"]: condition for condition in previous.get("conditions") or ()}
    conditions = []
    for kind, holds, why in wanted:
        status = "True" if holds else "False"
        old = before.get(kind, {})
        since = old.get("lastTransitionTime") if old.get("status") == status else None
        conditions.append(
            {"type": kind, "status": status, "lastProbeTime": None, "lastTransitionTime": since or timestamp(), **why}
        )
    status_now: Manifest = {
        "phase": phase,
        "conditions": conditions,
        "hostIP": host_ip,
        "hostIPs": [{"ip": host_ip}],
        "podIP": pod_ip,
        "podIPs": [{"ip": pod_ip}],
        "startTime": start_time,
        "containerStatuses": [each.to_api() for each in containers],
    }
    if inits:
        status_now["initContainerStatuses"] = [each.to_api() for each in inits]
    return status_now

"""What the Job controller decides of a Job of one pod without retries: pure functions of the Job and its pods."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

Json = dict[str, Any]


def job_pod(job: Json, owner: Json) -> Json:
    """The Job's pod."""
    template = json.loads(json.dumps(job["spec"]["template"]))
    labels = {"job-name": job["metadata"]["name"], "batch.kubernetes.io/job-name": job["metadata"]["name"]}
    metadata = {
        **template.get("metadata", {}),
        "generateName": f"{job['metadata']['name']}-",
        "ownerReferences": [owner],
    }
    metadata["labels"] = {**metadata.get("labels", {}), **labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def job_status(job: Json, pods: list[Json], now: datetime) -> Json | None:
    """The status that the Job ought to have; None when its pod is still to be made."""
    old = job.get("status", {})
    if old.get("conditions"):  # over
        return {key: value for key, value in old.items() if value is not None}
    begun = old.get("startTime") or now.strftime("%Y-%m-%dT%H:%M:%SZ")
    phases = [pod.get("status", {}).get("phase") for pod in pods]
    deadline = job["spec"].get("activeDeadlineSeconds")
    if "Succeeded" in phases:
        return _over(begun, "Complete", "CompletionsReached", "Reached expected number of succeeded pods", now)
    if "Failed" in phases:
        return _over(begun, "Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit", now)
    if deadline is not None and (now - datetime.fromisoformat(begun)).total_seconds() > deadline:
        return _over(begun, "Failed", "DeadlineExceeded", "Job was active longer than specified deadline", now)
    return {"startTime": begun, "active": 1} if pods else None


def _over(begun: str, kind: str, reason: str, message: str, now: datetime) -> Json:
    moment = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {
        "type": kind,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastProbeTime": moment,
        "lastTransitionTime": moment,
    }
    return {"startTime": begun, "succeeded" if kind == "Complete" else "failed": 1, "conditions": [condition]}

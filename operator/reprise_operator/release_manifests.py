"""The planned Deployment with what a release changes in it: another strategy, or another pod template. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reprise_operator.children.strategy import Strategy, default_strategy
from reprise_operator.naming import PLAN_HASH_ANNOTATION, digest
from reprise_operator.plan import Manifest, Plan


def template_hash(plan: Plan) -> str:
    """Ours, of the pod template: it changes with every input of the engine and with nothing else."""
    return digest(plan.workload["spec"]["template"])


def with_strategy(plan: Plan, strategy: Strategy | None) -> Manifest:
    """The planned Deployment with another strategy; still of this plan, so it keeps the plan's hash."""
    if strategy is None or strategy == default_strategy(plan.service):
        return plan.workload
    spec = plan.workload["spec"]
    rolling = {**spec["strategy"], "rollingUpdate": strategy.manifest()}
    return {**plan.workload, "spec": {**spec, "strategy": rolling}}


def with_template(plan: Plan, template: Mapping[str, Any] | None) -> Manifest | None:
    """The planned Deployment with another template, and so with another hash."""
    if template is None:
        return None
    annotations = template["metadata"].get("annotations") or {}
    # `kubectl rollout restart` is kubectl's: taken over by us it would go, and the pods with it, at the next change.
    kept = {key: value for key, value in annotations.items() if not key.startswith("kubectl.kubernetes.io/")}
    metadata = {
        key: value for key, value in template["metadata"].items() if key not in ("annotations", "creationTimestamp")
    }
    if kept:
        metadata["annotations"] = kept
    spec = {**plan.workload["spec"], "template": {**template, "metadata": metadata}}
    planned = plan.workload["metadata"]
    stamp = {**planned["annotations"], PLAN_HASH_ANNOTATION: digest(spec)}
    return {**plan.workload, "metadata": {**planned, "annotations": stamp}, "spec": spec}

"""What a failing container means: the image, the configuration, a volume, memory, the model, the arguments. Pure.

Read are the kubelet's reason, the container's last words, and the end of its log where that was read.
"""

from __future__ import annotations

import re

from reprise_operator.children.pod import CONTAINER
from reprise_operator.diagnosis import Diagnosis, State, stalled
from reprise_operator.observed import ContainerFailure, Observed, ObservedPod
from reprise_operator.out_of_memory import Shortage, shortage
from reprise_operator.plan import Plan

CRASHES = 2
"""Restarts from which a failing container is a crash loop, and not a hiccup."""

_IMAGE = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
# ErrImagePull and ImagePullBackOff take turns, the second quoting the first: what they share is the message.
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*"(: \w+: )?')
# Holds the delay, which grows with each crash: not a cause, and no reason to write the status again.
_RESTARTING = re.compile(r"^back-off \S+ restarting failed container.*$", re.DOTALL)
# Our engine's last words begin with the class of the error; vLLM's are matched by their text.
LAST_WORDS = (
    ("UnsupportedModel", re.compile(r"\bUnsupportedModel\b|Model architectures? .*not supported|is not a multimodal")),
    (
        "ModelNotFound",
        re.compile(r"\bModelNotFound\b|Repo id must be in the form|does not appear to have a file named"),
    ),
    ("DamagedModel", re.compile(r"\bDamagedModel\b")),
    # Of `reprise fetch`, which has tried again for minutes before it says so.
    ("ModelFetchDenied", re.compile(r"\bModelFetchDenied\b")),
    ("ModelFetchFailed", re.compile(r"\bModelFetchFailed\b")),
    ("ModelVolumeFull", re.compile(r"\bModelVolumeFull\b")),
    ("ModelVolumeUnusable", re.compile(r"\bModelVolumeUnusable\b")),
    (
        "InsufficientMemory",
        re.compile(r"\bInsufficientMemory\b|KV cache is needed, which is larger than the available"),
    ),
    ("DeviceNotFound", re.compile(r"--device is npu, but ")),
    ("DeviceUnusable", re.compile(r"\bDeviceError\b")),
    (
        "InvalidArguments",
        re.compile(r"\bConfigError\b|unrecognized arguments|: error: argument |^reprise[ \w]*: error: ", re.M),
    ),
)


def failure_of_pods(plan: Plan, observed: Observed) -> Diagnosis | None:
    """What stops the first pod, by name, of the present template; None where no failure is more than a hiccup."""
    for pod in sorted(observed.current_pods, key=lambda pod: pod.name):
        for failure in pod.failures:
            diagnosis = _classify(plan, pod, failure)
            if diagnosis is not None:
                return diagnosis
    return None


def _classify(plan: Plan, pod: ObservedPod, failure: ContainerFailure) -> Diagnosis | None:
    """None while it may still be a hiccup."""
    where = f"Pod {pod.name}" + (f", container {failure.container}" if failure.container else "")
    words = failure.message.strip()
    if failure.reason in _IMAGE:
        cause = _BACK_OFF.sub("", words) or "it is not there, or may not be read; see spec.runtime.imagePullSecrets"
        image = plan.workload["spec"]["template"]["spec"]["containers"][0]["image"]
        of = f" {image}" if failure.container == CONTAINER else ""
        return stalled("ImagePullFailed", f"{where}: the image{of} cannot be pulled: {cause}")
    if failure.reason in _CONFIG:
        missing = re.search(r"secret .* not found|in Secret ", words)
        return stalled("SecretNotFound" if missing else "ContainerConfigInvalid", f"{where}: {words or failure.reason}")
    if failure.reason == "FailedMount":
        return stalled("VolumeMountFailed", f"{where}: {words}")
    log = _log_of(pod, failure)
    killed = "OOMKilled" in (failure.reason, failure.terminated_reason)
    short = shortage(plan.service, reason="OOMKilled" if killed else failure.reason, words=words, log=log)
    if short is not None:
        return _out_of_memory(plan, where, failure, short)
    cause = _RESTARTING.sub("", words)
    code = "" if failure.exit_code is None else f" (exit code {failure.exit_code})"
    told = f"{where} fails{code}: {cause}" if cause else f"{where} fails{code} without a last word; see its log."
    for reason, pattern in LAST_WORDS:
        if pattern.search(cause):
            return stalled(reason, told + _went_down(plan, reason))
        if found := pattern.search(log):
            return stalled(reason, f"{where} fails{code}: {_line_at(log, found.start())}{_went_down(plan, reason)}")
    if failure.reason == "CrashLoopBackOff" or failure.restart_count >= CRASHES:
        return stalled("ContainerCrashing", told)
    return None


def _out_of_memory(plan: Plan, where: str, failure: ContainerFailure, short: Shortage) -> Diagnosis:
    """What a person has to do; or, where the next step of the memory's share may be the cure, that it is coming."""
    code = "" if failure.exit_code is None else f" (exit code {failure.exit_code})"
    told = f"{where} fails{code}: {short.words.rstrip('.')}."
    state = plan.tuning
    if short.memory == "host" and not short.words:
        told = f"{where} was killed for using more than its host memory (exit code 137)."
    if short.share_helps and state.can_be_lowered and failure.container == CONTAINER:
        reason = "DeviceOutOfMemory" if short.memory == "device" else "OutOfMemory"
        return Diagnosis(state=State.PROGRESSING, reason=reason, message=f"{told} The engine's share is lowered.")
    if short.memory == "host":
        advice = "Raise or remove spec.runtime.resources.limits.memory"
        lowered = f"; spec.memory.utilization went down to {state.effective:g}" if state.steps else ""
        return stalled("OutOfMemory", f"{told} {advice}{lowered}.")
    if short.too_small_a_share:
        advice = f"The share of {state.effective:g} holds the weights and a step, but no KV cache: "
        if state.steps:
            advice += "raise spec.memory.floor to end the lowering sooner, "
        else:
            advice += "raise spec.memory.utilization, "
        advice += "lower spec.model.maxModelLen or use more devices a pod."
    elif not short.share_helps:
        advice = "spec.memory.utilization has no part in this."
    elif state.auto_tune:
        advice = (
            f"spec.memory.utilization is at its floor, {state.effective:g}: lower spec.memory.floor or "
            "spec.model.maxModelLen, or use more devices a pod."
        )
    else:
        advice = "Lower spec.memory.utilization or spec.model.maxModelLen, or set spec.memory.autoTune to true."
    return stalled("DeviceOutOfMemory", f"{told} {advice}")


def _went_down(plan: Plan, reason: str) -> str:
    """What the steps of the memory's share have to do with it."""
    if reason != "InsufficientMemory" or not plan.tuning.steps:
        return ""
    first, now = plan.tuning.first.effective, plan.tuning.effective
    return f" (spec.memory.utilization went down from {first:g} to {now:g}; raise spec.memory.floor to end that sooner)"


def _log_of(pod: ObservedPod, failure: ContainerFailure) -> str:
    """The end of the log of the container's last run, where it has been read."""
    ends = [end for end in pod.terminations if end.container == failure.container and end.log]
    return ends[-1].log if ends and not failure.init else ""


def _line_at(text: str, position: int) -> str:
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return text[start : len(text) if end < 0 else end].strip()

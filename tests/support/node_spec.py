"""From a pod's spec to what a local process needs: pure functions, and the map of images to local commands.

A process has no mount namespace of its own, so a container path is REWRITTEN to the host path behind it wherever it
stands in the command, the args or the environment: alone, as a prefix before "/", or after "=" or ":". Limits that
follow: a path that the program hard-codes or reads from a file is not rewritten, read-only mounts are not enforced,
the root file system, the user and the security context are those of the caller, and resource limits are not applied.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from kubernetes.utils.quantity import parse_quantity as _parse_quantity

from tests.support.node_client import Manifest

ANY_ADDRESS = "0.0.0.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What stands for a container image on this node.

    `host_flag`: the option by which the program is told its listening address. Every pod has a loopback address of
    its own, so "all addresses" (given, or the program's default) becomes the pod's address.
    """

    entrypoint: tuple[str, ...]
    default_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    host_flag: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A container path and the host path behind it."""

    container: str
    host: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One container, ready to be started."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path


def parse_quantity(quantity: str) -> Decimal:
    """A Kubernetes quantity ("500m", "2Gi") as a number."""
    parsed: Decimal = _parse_quantity(quantity)  # type: ignore[no-untyped-call]
    return parsed


class ConfigProblem(Exception):
    """The container cannot be made yet: the kubelet's CreateContainerConfigError, its message included."""


class ImageProblem(Exception):
    """The image is not to be had. `reason` is ErrImagePull, ErrImageNeverPull or InvalidImageName."""

    def __init__(self, *, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def find_image(images: Mapping[str, Image], container: Manifest) -> Image:
    """The image of a container by its longest matching prefix in `images`; raises ImageProblem as a registry would."""
    name = container.get("image", "")
    if not re.fullmatch(r"[a-z0-9][a-zA-Z0-9._/:@-]*", name):
        raise ImageProblem(
            reason="InvalidImageName",
            message=f'Failed to apply default image tag "{name}": couldn\'t parse image name "{name}": '
            "invalid reference format",
        )
    known = [prefix for prefix in images if name == prefix or name.startswith((f"{prefix}:", f"{prefix}@"))]
    if known:
        return images[max(known, key=len)]
    if container.get("imagePullPolicy") == "Never":
        raise ImageProblem(
            reason="ErrImageNeverPull",
            message=f'Container image "{name}" is not present with pull policy of Never',
        )
    raise ImageProblem(
        reason="ErrImagePull",
        message=f'failed to pull and unpack image "{name}": failed to resolve reference "{name}": {name}: not found',
    )


def rewrite(text: str, mounts: Sequence[Mount]) -> str:
    """Replaces container paths by host paths; the longest mount path wins."""
    for mount in sorted(mounts, key=lambda mount: len(mount.container), reverse=True):
        path = mount.container.rstrip("/")
        pattern = rf"(?:(?<=^)|(?<=[=:])){re.escape(path)}(?=$|[/:])"
        replaced = re.sub(pattern, lambda _, host=str(mount.host): host, text)  # type: ignore[misc]
        if replaced != text:
            return replaced
    return text


def expand(text: str, env: Mapping[str, str]) -> str:
    """$(VAR) as Kubernetes expands it: unknown names stay, $$ is a literal dollar sign."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return env.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([A-Za-z_.\-][A-Za-z0-9_.\-]*)\)", value, text)


def build_launch(
    *,
    container: Manifest,
    image: Image,
    env: Mapping[str, str],
    mounts: Sequence[Mount],
    pod_ip: str,
    cwd: Path,
    termination_log: Path,
) -> Launch:
    """`env` is the container's own, resolved and expanded. Raises ConfigProblem where the program does not exist.

    What the image brings is of this host already: only the pod's own words are rewritten.
    """
    whole = {**image.env, **{name: rewrite(value, mounts) for name, value in env.items()}}
    whole["TERMINATION_LOG_PATH"] = str(termination_log)
    for mount in mounts:
        if mount.container.rstrip("/") == "/tmp":
            whole.setdefault("TMPDIR", str(mount.host))
    words = [rewrite(expand(part, env), mounts) for part in container.get("args") or ()]
    if container.get("command"):
        argv = [rewrite(expand(part, env), mounts) for part in container["command"]] + words
    else:
        argv = [*image.entrypoint, *(image.default_args if container.get("args") is None else words)]
    if image.host_flag is not None:
        argv = _listen_on(argv, flag=image.host_flag, address=pod_ip)
    program = shutil.which(argv[0], path=whole.get("PATH"))
    if program is None:
        raise ConfigProblem(f'exec: "{argv[0]}": executable file not found in $PATH')
    return Launch(argv=(program, *argv[1:]), env=whole, cwd=cwd)


def _listen_on(argv: list[str], *, flag: str, address: str) -> list[str]:
    """The same command, bound to `address` if it would bind to all addresses. What has no --port does not listen."""
    if not any(part == "--port" or part.startswith("--port=") for part in argv):
        return argv
    bound = list(argv)
    for at, part in enumerate(argv):
        if part == flag and at + 1 < len(argv):
            if argv[at + 1] == ANY_ADDRESS:
                bound[at + 1] = address
            return bound
        if part.startswith(f"{flag}="):
            if part == f"{flag}={ANY_ADDRESS}":
                bound[at] = f"{flag}={address}"
            return bound
    return [*bound, flag, address]


def field_value(pod: Manifest, path: str, *, pod_ip: str, host_ip: str) -> str:
    """The downward API's fieldRef. Raises ConfigProblem for a path that Kubernetes does not offer."""
    metadata, spec = pod["metadata"], pod["spec"]
    if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str((metadata.get(match[1]) or {}).get(match[2], ""))
    values: dict[str, str] = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.hostIP": host_ip,
        "status.hostIPs": host_ip,
        "status.podIP": pod_ip,
        "status.podIPs": pod_ip,
    }
    if path not in values:
        raise ConfigProblem(f"unsupported fieldPath: {path}")
    return values[path]


def resource_value(container: Manifest, ref: Manifest) -> str:
    """The downward API's resourceFieldRef, of the container itself: limits or requests, divided, rounded up."""
    kind, _, name = str(ref["resource"]).partition(".")
    resources = container.get("resources") or {}
    quantity = (resources.get(kind) or {}).get(name) or (resources.get("limits") or {}).get(name, "0")
    divisor = parse_quantity(ref.get("divisor") or "1") or Decimal(1)
    return str(-int(-parse_quantity(quantity) // divisor))


def requests_of(pod: Manifest) -> dict[str, Decimal]:
    """What the scheduler counts: the sum over containers, or an init container's if that is larger."""
    total: dict[str, Decimal] = {"pods": Decimal(1)}
    for container in pod["spec"].get("containers") or ():
        for name, quantity in _requests(container).items():
            total[name] = total.get(name, Decimal(0)) + quantity
    for container in pod["spec"].get("initContainers") or ():
        for name, quantity in _requests(container).items():
            total[name] = max(total.get(name, Decimal(0)), quantity)
    return total


def _requests(container: Manifest) -> dict[str, Decimal]:
    resources: dict[str, Any] = container.get("resources") or {}
    merged = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: parse_quantity(quantity) for name, quantity in merged.items()}


def unschedulable(
    pod: Manifest, *, labels: Mapping[str, str], allocatable: Mapping[str, str], taken: Mapping[str, Decimal]
) -> str | None:
    """Why the one node cannot take the pod, in the words of the default scheduler; None if it can."""
    wanted = pod["spec"].get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in wanted.items()) or not _is_attracted(pod, labels):
        return "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
    lacking = [
        name
        for name, quantity in sorted(requests_of(pod).items())
        if quantity > 0 and quantity > parse_quantity(allocatable.get(name, "0")) - taken.get(name, Decimal(0))
    ]
    if lacking:
        return "0/1 nodes are available: " + ", ".join(f"1 Insufficient {name}" for name in lacking) + "."
    return None


def _is_attracted(pod: Manifest, labels: Mapping[str, str]) -> bool:
    """The required node affinity: one of the terms must hold, with all of its matchExpressions."""
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    return any(
        all(_matches(expression, labels) for expression in term.get("matchExpressions") or ())
        for term in required["nodeSelectorTerms"]
    )


def _matches(expression: Manifest, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case operator:
            raise ValueError(f"this node has no node affinity operator {operator}")


def program_path(*folders: Path) -> str:
    """A PATH for containers: the given folders, then the system's."""
    return ":".join([*map(str, folders), "/usr/local/bin", "/usr/bin", "/bin"])

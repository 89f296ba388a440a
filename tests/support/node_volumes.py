"""Volumes of a pod as folders of the host."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from tests.support.node_client import Manifest
from tests.support.node_spec import ConfigProblem, Mount, expand, field_value, resource_value

Fetch = Callable[[str, str], Awaitable[Manifest | None]]
"""(plural, name) → the object in the pod's namespace, or None."""


class MountProblem(Exception):
    """A volume cannot be set up yet: the kubelet's FailedMount, its message included."""


async def prepare_volume(
    volume: Manifest,
    *,
    pod: Manifest,
    pod_folder: Path,
    claims_folder: Path,
    host_paths: Mapping[str, Path],
    fetch: Fetch,
    pod_ip: str,
    host_ip: str,
) -> Path:
    """The host path behind one entry of spec.volumes. Raises MountProblem."""
    name: str = volume["name"]
    own: Path = pod_folder / "volumes" / name
    if (host := volume.get("hostPath")) is not None:
        return _host_path(host, host_paths=host_paths, volume=name)
    if (claim := volume.get("persistentVolumeClaim")) is not None:
        if await fetch("persistentvolumeclaims", claim["claimName"]) is None:
            raise MountProblem(f'persistentvolumeclaim "{claim["claimName"]}" not found')
        own = claims_folder / pod["metadata"]["namespace"] / claim["claimName"]
        own.mkdir(parents=True, exist_ok=True)
        return own
    own.mkdir(parents=True, exist_ok=True)
    if "emptyDir" in volume:
        return own
    sources = (volume.get("projected") or {}).get("sources")
    for source in [volume] if sources is None else sources:
        await _write_source(source, pod=pod, folder=own, fetch=fetch, pod_ip=pod_ip, host_ip=host_ip, volume=name)
    return own


def _host_path(host: Manifest, *, host_paths: Mapping[str, Path], volume: str) -> Path:
    path = str(host["path"])
    real = Path(path)
    for prefix in sorted(host_paths, key=len, reverse=True):
        if path == prefix or path.startswith(prefix.rstrip("/") + "/"):
            real = host_paths[prefix] / path[len(prefix) :].lstrip("/")
            break
    kind = host.get("type") or ""
    missing = f'MountVolume.SetUp failed for volume "{volume}" : hostPath type check failed: {path} is not a'
    if kind == "Directory" and not real.is_dir():
        raise MountProblem(f"{missing} directory")
    if kind == "File" and not real.is_file():
        raise MountProblem(f"{missing} file")
    if not real.exists() and kind in ("", "DirectoryOrCreate"):
        real.mkdir(parents=True, exist_ok=True)
    return real


async def _write_source(
    source: Manifest, *, pod: Manifest, folder: Path, fetch: Fetch, pod_ip: str, host_ip: str, volume: str
) -> None:
    for kind, plural in (("secret", "secrets"), ("configMap", "configmaps")):
        if (reference := source.get(kind)) is not None:
            name = reference.get("secretName") or reference.get("name")
            found = await fetch(plural, name)
            if found is None:
                if reference.get("optional"):
                    return
                raise MountProblem(
                    f'MountVolume.SetUp failed for volume "{volume}" : {kind.lower()} "{name}" not found'
                )
            content = files_of(found)
            wanted = {item["key"]: item["path"] for item in reference.get("items") or ()} or {k: k for k in content}
            for key, path in wanted.items():
                if key not in content:
                    raise MountProblem(
                        f'MountVolume.SetUp failed for volume "{volume}" : '
                        f"references non-existent {kind.lower()} key: {key}"
                    )
                _write(folder / path, content[key])
            return
    if (downward := source.get("downwardAPI")) is not None:
        for item in downward.get("items") or ():
            if "fieldRef" not in item:
                raise MountProblem(f'volume "{volume}": this node knows only fieldRef in a downwardAPI volume')
            value = field_value(pod, item["fieldRef"]["fieldPath"], pod_ip=pod_ip, host_ip=host_ip)
            _write(folder / item["path"], value.encode())
        return
    if "serviceAccountToken" in source:  # nothing on this node talks to the API server from within a pod
        return
    raise MountProblem(f'volume "{volume}": this node has no volumes of the kind {sorted(set(source) - {"name"})}')


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def files_of(found: Manifest) -> dict[str, bytes]:
    """The entries of a Secret or a ConfigMap."""
    plain = {key: str(value).encode() for key, value in (found.get("data") or {}).items()}
    if found.get("kind") == "Secret":
        plain = {key: base64.b64decode(value) for key, value in plain.items()}
    binary = {key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}
    return {**plain, **binary}


def mounts_of(container: Manifest, volumes: Mapping[str, Path]) -> Sequence[Mount]:
    """Where the container's volumeMounts are on the host."""
    mounts = []
    for mount in container.get("volumeMounts") or ():
        if mount["name"] not in volumes:
            raise ConfigProblem(f'volume "{mount["name"]}" is not among the volumes of the pod')
        host = volumes[mount["name"]]
        if sub := mount.get("subPath"):
            host = host / sub
        mounts.append(Mount(container=mount["mountPath"], host=host))
    return mounts


async def environment_of(
    container: Manifest, *, pod: Manifest, fetch: Fetch, pod_ip: str, host_ip: str
) -> dict[str, str]:
    """envFrom and env, resolved and expanded in order. Raises ConfigProblem in the kubelet's words."""
    env: dict[str, str] = {}
    namespace = pod["metadata"]["namespace"]
    for source in container.get("envFrom") or ():
        for kind, plural in (("secretRef", "secrets"), ("configMapRef", "configmaps")):
            if (reference := source.get(kind)) is None:
                continue
            found = await fetch(plural, reference["name"])
            if found is None:
                if reference.get("optional"):
                    continue
                raise ConfigProblem(f'{plural[:-1]} "{reference["name"]}" not found')
            for key, content in files_of(found).items():
                env[(source.get("prefix") or "") + key] = content.decode(errors="replace")
    for entry in container.get("env") or ():
        name, reference = entry["name"], entry.get("valueFrom")
        if reference is None:
            env[name] = expand(str(entry.get("value") or ""), env)
        elif (at := reference.get("fieldRef")) is not None:
            env[name] = field_value(pod, at["fieldPath"], pod_ip=pod_ip, host_ip=host_ip)
        elif (at := reference.get("resourceFieldRef")) is not None:
            env[name] = resource_value(container, at)
        else:
            value = await _keyed(reference, namespace=namespace, fetch=fetch)
            if value is not None:
                env[name] = value
    return env


async def _keyed(reference: Manifest, *, namespace: str, fetch: Fetch) -> str | None:
    for kind, plural, title in (("secretKeyRef", "secrets", "Secret"), ("configMapKeyRef", "configmaps", "ConfigMap")):
        if (at := reference.get(kind)) is None:
            continue
        found = await fetch(plural, at["name"])
        if found is None:
            if at.get("optional"):
                return None
            raise ConfigProblem(f'{title.lower()} "{at["name"]}" not found')
        content = files_of(found)
        if at["key"] not in content:
            if at.get("optional"):
                return None
            raise ConfigProblem(f"couldn't find key {at['key']} in {title} {namespace}/{at['name']}")
        return content[at["key"]].decode(errors="replace")
    raise ConfigProblem(f"this node has no environment source of the kind {sorted(reference)}")

"""The Secrets and ConfigMaps whose content the pods take in when they start, and how a change of it rolls them. Pure.

A container reads its environment once. So the pod template carries, in an annotation, what was seen of each referenced
object; when that changes the template does, and the pods roll. What is written there is decided so:

- A keyed hash (HMAC-SHA256) of the keys that are used. Whoever may read pods may read it, so a plain hash would let
  them try out guesses at a password; and the object's uid or any other public value is no key. The operator's key comes
  from a Secret of its own namespace (--reference-key-file), so the same content gives the same hash after a restart.
- Not the object's resourceVersion: a label, or a tool that touches the object, changes it and would roll for nothing.
- With each hash goes the key's name (a few bits of an HMAC of nothing). A hash that was made with another key cannot be
  compared: it stands until this process sees the content change. So a lost or replaced key, or none at all (then each
  process makes one up), rolls nothing; what is missed is a change made while no operator was running.
- An object, or a key of it, that is not there leaves the entry as it was: a vanished Secret never takes a pod away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from reprise_operator.children.fetch import CREDENTIALS
from reprise_operator.naming import digest, stamped
from reprise_operator.resource import FetchedModel, InferenceService
from reprise_operator.settings import GROUP

if TYPE_CHECKING:
    from reprise_operator.observed import Observed
    from reprise_operator.plan import Plan

REFERENCES_ANNOTATION = f"{GROUP}/references"
"""On the pods: `Kind/name=<name of the key>.<hash>`, by comma."""

ReferenceKind = Literal["Secret", "ConfigMap"]


@dataclass(frozen=True, slots=True, order=True)
class ObjectRef:
    """A Secret or ConfigMap of the service's namespace."""

    kind: ReferenceKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the pods use of one object, and which fields of the spec say so."""

    object: ObjectRef
    required: frozenset[str] = frozenset()
    """Keys without which no pod can start."""
    optional: frozenset[str] = frozenset()
    fields: tuple[str, ...] = ()

    @property
    def keys(self) -> frozenset[str]:
        return self.required | self.optional


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedReference:
    """What was seen of an object. No content is kept, only keyed hashes of it."""

    present: bool
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Key → hash of its value."""
    changed: frozenset[str] = frozenset()
    """Keys whose value this process has seen change."""
    key_name: str = ""
    """Of the key the hashes were made with."""


def references_of(service: InferenceService) -> tuple[Reference, ...]:
    """Every object the pods of `service` read at their start, each once, in order."""
    used: dict[ObjectRef, tuple[set[str], set[str], list[str]]] = {}

    def use(kind: ReferenceKind, name: str, where: str, *, required: Iterable[str], optional: Iterable[str]) -> None:
        must, may, fields = used.setdefault(ObjectRef(kind, name), (set(), set(), []))
        must.update(required)
        may.update(optional)
        fields.append(where)

    spec = service.spec
    api_key = spec.auth.api_key_secret_ref
    if api_key is not None:
        use("Secret", api_key.name, "spec.auth.apiKeySecretRef", required=[api_key.key], optional=())
    credentials = spec.model.secret_ref
    if credentials is not None and isinstance(service.source, FetchedModel):
        required, optional = CREDENTIALS[service.source.scheme]
        use("Secret", credentials.name, "spec.model.secretRef", required=required, optional=optional)
    salt = spec.prefix_caching.isolation_secret_ref
    if salt is not None and service.prefix_caching:
        use("Secret", salt.name, "spec.prefixCaching.isolationSecretRef", required=[salt.key], optional=())
    warmup = None if service.warmup is None else service.warmup.config_map_key_ref
    if warmup is not None:
        where = "spec.prefixCaching.warmup.configMapKeyRef"
        # Without it a pod starts all the same, only colder.
        use("ConfigMap", warmup.name, where, required=(), optional=[warmup.key])
    for variable in spec.runtime.env:
        for kind, source in _sources(variable.value_from or {}):
            keys, where = [str(source.get("key"))], f"spec.runtime.env ({variable.name})"
            may_miss = bool(source.get("optional"))
            use(
                *(kind, str(source.get("name")), where),
                required=() if may_miss else keys,
                optional=keys if may_miss else (),
            )
    return tuple(
        Reference(
            object=key, required=frozenset(must), optional=frozenset(may - must), fields=tuple(dict.fromkeys(fields))
        )
        for key, (must, may, fields) in sorted(used.items())
    )


def _sources(value_from: Mapping[str, Any]) -> Iterable[tuple[ReferenceKind, Mapping[str, Any]]]:
    if (secret := value_from.get("secretKeyRef")) is not None:
        yield "Secret", secret
    if (config_map := value_from.get("configMapKeyRef")) is not None:
        yield "ConfigMap", config_map


_REASONS = {
    ("Secret", False): "SecretNotFound",
    ("Secret", True): "SecretKeyNotFound",
    ("ConfigMap", False): "ConfigMapNotFound",
    ("ConfigMap", True): "ConfigMapKeyNotFound",
}
"""(kind, whether it is a key that is missing) → reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unresolved:
    """An object, or keys of it, that the pods need and that are not there."""

    reference: Reference
    missing_keys: tuple[str, ...] = ()
    """Empty: the object itself."""

    @property
    def reason(self) -> str:
        return _REASONS[self.reference.object.kind, bool(self.missing_keys)]

    def message(self, namespace: str) -> str:
        kind, name = self.reference.object.kind, self.reference.object.name
        asked = f"({', '.join(self.reference.fields)} asks for it)"
        if not self.missing_keys:
            return f"{kind} {name} does not exist in namespace {namespace} {asked}."
        return f"{kind} {name} in namespace {namespace} has no key {', '.join(self.missing_keys)} {asked}."


def unresolved(plan: Plan, observed: Observed) -> tuple[Unresolved, ...]:
    """What of the plan's references is known to be missing."""
    found = []
    for reference in plan.references:
        seen = observed.references.get(reference.object)
        if seen is None or not reference.required:
            continue
        missing = tuple(sorted(reference.required - seen.fingerprints.keys()))
        if not seen.present:
            found.append(Unresolved(reference=reference))
        elif missing:
            found.append(Unresolved(reference=reference, missing_keys=missing))
    return tuple(found)


def followed(plan: Plan, observed: Observed) -> Plan:
    """`plan` whose pod template carries what was seen of the objects; the plan itself where it refers to none."""
    if not plan.references:
        return plan
    before = _entries(_present_annotation(plan, observed))
    entries: dict[str, str] = {}
    for reference in plan.references:
        entry = _entry(reference, observed.references.get(reference.object), before.get(str(reference.object)))
        if entry is not None:
            entries[str(reference.object)] = entry
    if not entries:
        return plan
    workload = plan.workload
    template = workload["spec"]["template"]
    metadata = template["metadata"]
    annotations = {
        **metadata.get("annotations", {}),
        REFERENCES_ANNOTATION: ",".join(f"{name}={entry}" for name, entry in sorted(entries.items())),
    }
    template = {**template, "metadata": {**metadata, "annotations": annotations}}
    return replace(plan, workload=stamped({**workload, "spec": {**workload["spec"], "template": template}}))


def rotated(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """Which objects' entries differ between two workloads, as Kind/name; those that both have."""
    old, new = _entries(annotation_of(before)), _entries(annotation_of(after))
    return tuple(name for name, entry in sorted(new.items()) if name in old and old[name] != entry)


def _entry(reference: Reference, seen: ObservedReference | None, before: str | None) -> str | None:
    if seen is None or not seen.present or reference.required - seen.fingerprints.keys():
        return before
    used = {key: value for key, value in seen.fingerprints.items() if key in reference.keys}
    if before is not None and before.partition(".")[0] != seen.key_name and not seen.changed & reference.keys:
        return before
    # The parts are keyed hashes already: to put them together needs no key.
    return f"{seen.key_name}.{digest(used, length=32)}"


def annotation_of(workload: Mapping[str, Any]) -> str:
    """The annotation in a workload's pod template; empty where there is none."""
    metadata = ((workload.get("spec") or {}).get("template") or {}).get("metadata") or {}
    return str((metadata.get("annotations") or {}).get(REFERENCES_ANNOTATION) or "")


def _present_annotation(plan: Plan, observed: Observed) -> str:
    kind, name = plan.workload["kind"], plan.workload["metadata"]["name"]
    found = (child.body for child in observed.children if (child.kind, child.name) == (kind, name))
    return annotation_of(next(found, {}))


def _entries(annotation: str) -> dict[str, str]:
    pairs = (item.rpartition("=") for item in annotation.split(",") if "=" in item)
    return {name: entry for name, _, entry in pairs}

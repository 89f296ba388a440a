"""All that is seen of one service at one moment: its children, its pods, what these refer to → `Observed`.

The reads of one pass. What is read of pods less often than that (figures, logs, mounts) and of what services share
(references) is remembered by its reader, until the pods are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from reprise_operator.bodies import current_template_hash, observed_pod, templates
from reprise_operator.cluster import Cluster, Key
from reprise_operator.discovery import OptionalKinds
from reprise_operator.kinds import OPTIONAL_TYPES, ResourceType
from reprise_operator.log_tails import LogTails
from reprise_operator.mounts import MountReader
from reprise_operator.naming import OWNER_UID_LABEL, selector_labels
from reprise_operator.observed import Observed
from reprise_operator.plan import Plan
from reprise_operator.references import ObjectRef, ObservedReference
from reprise_operator.resource import Identity
from reprise_operator.rollout import key_of
from reprise_operator.rotation import ReferenceReader
from reprise_operator.scraper import Scraper
from reprise_operator.service_memory import ServiceMemory
from reprise_operator.spec_types import Runtime
from reprise_operator.watch import WatchHealth, watched_objects
from reprise_operator.workloads import workload_body


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """Reads of one pass. The readers are those of the process."""

    cluster: Cluster
    kinds: OptionalKinds
    scraper: Scraper
    logs: LogTails
    mounts: MountReader
    references: ReferenceReader
    health: WatchHealth
    clock: Callable[[], float]

    async def observe(self, identity: Identity, wanted: Plan | None, memory: ServiceMemory) -> Observed:
        """What is there of the service. `wanted` None: there is no Plan, and nothing it asks for to be looked for.

        Raises ClusterError.
        """
        namespace, labels = identity.namespace, selector_labels(identity)
        children = await self.cluster.children(
            namespace,
            owner_uid=identity.uid,
            selector={OWNER_UID_LABEL: identity.uid},
            planned=[(key.kind, key.name) for key in map(key_of, wanted.children if wanted else ())],
            optional=self._optional_kinds(identity, wanted, memory),
        )
        pod_bodies = await self.cluster.pods(namespace, labels)
        self.health.read_all(Key(namespace, identity.name), watched_objects(children, pod_bodies))
        pods = await self.mounts.look(self.cluster, namespace, [observed_pod(body) for body in pod_bodies])
        uids = frozenset(pod.uid for pod in pods)
        references = await self.references.read(self.cluster, namespace, wanted.references if wanted else ())
        # Of an object that is read whether it is there is known by that.
        names = (wanted.secret_names, wanted.config_map_names) if wanted else ((), ())
        secrets = [name for name in names[0] if ObjectRef("Secret", name) not in references]
        config_maps = [name for name in names[1] if ObjectRef("ConfigMap", name) not in references]
        absent = tuple(name for name in names[1] if _is_absent(references.get(ObjectRef("ConfigMap", name))))
        self.forget(memory.pods - uids)
        memory.pods = uids
        if wanted is not None and wanted.service.spec.runtime.name is Runtime.VLLM_ASCEND:
            pods = await self.logs.observe(namespace, pods, read=self.cluster.log_tail)
        workload = workload_body(wanted, Observed(at=self.clock(), children=children))
        # Only Deployments have them.
        has_replica_sets = workload is not None and workload["kind"] == "Deployment"
        replica_sets = await self.cluster.replica_sets(namespace, labels) if has_replica_sets else ()
        return Observed(
            at=self.clock(),
            children=children,
            pods=await self.scraper.observe(pods),
            missing_secrets=await self.cluster.missing_secrets(namespace, secrets),
            references=references,
            missing_claims=await self.cluster.missing_claims(namespace, wanted.claim_names if wanted else ()),
            missing_config_maps=(*absent, *await self.cluster.missing_config_maps(namespace, config_maps)),
            template_hash=current_template_hash(workload, replica_sets),
            templates=templates(workload, replica_sets),
            apply_errors=dict(memory.refused),
        )

    def forget(self, pods: Iterable[str]) -> None:
        """Drops what is remembered of pods, given by their UIDs, that are gone."""
        gone = frozenset(pods)
        self.scraper.forget(gone)
        self.logs.forget(gone)
        self.mounts.forget(gone)

    def _optional_kinds(
        self, identity: Identity, wanted: Plan | None, memory: ServiceMemory
    ) -> frozenset[ResourceType]:
        """Those of which this service has an object, or may have: only these cost a request."""
        applied = {key.kind for key in memory.applied}
        kinds = self.kinds.held_by(identity.uid) | {kind for kind in OPTIONAL_TYPES if kind.kind in applied}
        return (kinds | (wanted.asks if wanted else memory.asks)) & self.kinds.available


def _is_absent(reference: ObservedReference | None) -> bool:
    return reference is not None and not reference.present

"""Leader election by a Lease: of several operator processes one works, the others wait.

The chart runs one replica with strategy Recreate, so this only matters in the seconds when a node is lost or somebody
scales the operator: two that reconcile at once would apply two versions' manifests in turns. The lock and its protocol
are the client library's; ours is that no fault of the network ends the process before the lease does, and that a clean
exit hands the lease over at once.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import aiohttp
from kubernetes.aio.client import ApiClient, V1Lease, V1ObjectMeta
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

logger = logging.getLogger(__name__)

_FAULTS = (ApiException, aiohttp.ClientError, TimeoutError, OSError)


class LeadershipLost(Exception):
    """The lease could not be renewed in time; another process may lead now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """Seconds. A lease is taken over when its holder did not renew it for `duration`; the holder gives up after
    `deadline` without a renewal, which is sooner."""

    duration: int = 15
    deadline: float = 10.0
    period: float = 2.0


class _Lock(LeaseLock):
    """LeaseLock.create of kubernetes 37.0 passes pretty=True where its own client takes a string, and fails always."""

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        lease = V1Lease(metadata=V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        try:
            await self.api_instance.create_namespaced_lease(namespace, lease)
        except ApiException as error:
            logger.warning("lease %s/%s was not created: %s", namespace, name, error.reason)
            return False
        return True


class Leadership:
    def __init__(
        self, api: ApiClient, *, namespace: str, name: str, identity: str, times: LeaseTimes | None = None
    ) -> None:
        self._times = times or LeaseTimes()
        self._lock = _Lock(name, namespace, identity, api)
        self._election = LeaderElection(
            Config(
                self._lock,
                lease_duration=self._times.duration,
                renew_deadline=int(self._times.deadline),
                retry_period=int(self._times.period),
                onstarted_leading=_nothing,
                onstopped_leading=_nothing,
            )
        )

    async def acquire(self) -> None:
        """Returns when this process leads."""
        waiting = False
        while not await self._try():
            if not waiting:
                logger.info("another operator holds lease %s/%s; waiting", self._lock.namespace, self._lock.name)
                waiting = True
            await asyncio.sleep(self._times.period)
        logger.info("leading by lease %s/%s as %s", self._lock.namespace, self._lock.name, self._lock.identity)

    async def keep(self) -> None:
        """Renews until cancelled. Raises LeadershipLost."""
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        while True:
            await asyncio.sleep(self._times.period)
            if await self._try():
                renewed = loop.time()
            elif loop.time() - renewed > self._times.deadline:
                raise LeadershipLost(f"lease {self._lock.namespace}/{self._lock.name} was not renewed in time")

    async def release(self) -> None:
        """Lets the next process lead at once. Best effort: without it the lease runs out."""
        try:
            held, _ = await self._lock.get(self._lock.name, self._lock.namespace)
            lease = self._lock.lease_reference
            if not held or lease is None or lease.spec is None or lease.spec.holder_identity != self._lock.identity:
                return
            lease.spec.holder_identity = None
            await self._lock.api_instance.replace_namespaced_lease(
                name=self._lock.name, namespace=self._lock.namespace, body=lease
            )
        except _FAULTS as error:
            logger.warning("the lease was not released, it runs out by itself: %s", error)

    async def _try(self) -> bool:
        try:
            async with asyncio.timeout(self._times.deadline / 2):
                return bool(await self._election.try_acquire_or_renew())
        except _FAULTS as error:
            logger.warning("lease %s/%s: %s", self._lock.namespace, self._lock.name, error or type(error).__name__)
            return False


async def _nothing() -> None:
    """The library insists on callbacks; what the leader does is __main__'s."""

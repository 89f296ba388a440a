"""Leader election by a Lease: of several operator processes one works, the others wait.

Two that reconcile at once would apply two versions' manifests in turns. So the leader gives up before anybody else may
take over: it stops `deadline` seconds after its last renewal *began*, others take over `duration` seconds after they
*saw* that renewal, and the second is the longer. All of it is measured by a clock that never jumps; the times in the
Lease are for people. A clean exit hands the lease over at once.

`Election` is the decision, pure; `Leadership` carries it out. The client library's own election is not used: it
measures by the wall clock, so one correction of it makes two leaders or none.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import aiohttp
from kubernetes.aio.client import ApiClient, CoordinationV1Api, V1Lease, V1LeaseSpec, V1ObjectMeta
from kubernetes.aio.client.exceptions import ApiException

logger = logging.getLogger(__name__)

_FAULTS = (ApiException, aiohttp.ClientError, TimeoutError, OSError)


class LeadershipLost(Exception):
    """The lease could not be renewed in time, or another process holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """Seconds. A lease is taken over when its holder did not renew it for `duration`; the holder gives up after
    `deadline` without a renewal, which is sooner."""

    duration: int = 15
    deadline: float = 10.0
    period: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a Lease says. `renewed` is only compared with itself, never with a clock."""

    holder: str | None
    renewed: str | None
    duration: float | None
    """Seconds its holder asks for; None where it does not say."""


class Claim(enum.Enum):
    """What to do about the lease now."""

    CREATE = "create"
    RENEW = "renew"
    TAKE = "take"
    WAIT = "wait"


class Election:
    """Whether the lease may be had. Pure: the time is passed in, in seconds of a clock that never jumps."""

    def __init__(self, *, identity: str, duration: float) -> None:
        self._identity = identity
        self._duration = duration
        self._seen: Held | None = None
        self._since = 0.0

    def decide(self, held: Held | None, *, now: float) -> Claim:
        """`held` is the Lease as just read, None where there is none."""
        if held is None:
            return Claim.CREATE
        if held.holder == self._identity:
            return Claim.RENEW
        if not held.holder:
            return Claim.TAKE
        if held != self._seen:
            # Somebody renewed it. How long ago is not known, only that it was before now.
            self._seen, self._since = held, now
        # The longer patience counts: another release may keep its lease for longer than this one.
        patience = max(self._duration, held.duration or 0.0)
        return Claim.TAKE if now - self._since >= patience else Claim.WAIT


class Leadership:
    """This process's part in the election of lease `namespace`/`name`; `identity` is its own and nobody else's."""

    def __init__(
        self,
        api: ApiClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        times: LeaseTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = CoordinationV1Api(api)
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._times = times or LeaseTimes()
        self._clock = clock
        self._election = Election(identity=identity, duration=self._times.duration)
        self._renewed = 0.0
        self._holder: str | None = None

    @property
    def standby(self) -> bool:
        """Whether another process was seen to hold the lease: then waiting is all there is to do, and no fault."""
        return self._holder not in (None, self._identity)

    def __str__(self) -> str:
        return f"lease {self._namespace}/{self._name}"

    async def acquire(self) -> None:
        """Returns when this process leads."""
        waits_for: str | None = None
        while not await self._try(within=self._times.deadline / 2):
            if self._holder is not None and self._holder != waits_for:
                logger.info("another operator holds %s (%s); waiting", self, self._holder)
                waits_for = self._holder
            await asyncio.sleep(self._times.period)
        logger.info("leading by %s as %s", self, self._identity)

    async def keep(self) -> None:
        """Renews until cancelled. Raises LeadershipLost, `deadline` seconds after the last renewal at the latest."""
        while True:
            left = self._left()
            if left <= 0:
                raise LeadershipLost(f"{self} was not renewed for {self._times.deadline:g} s")
            await asyncio.sleep(min(self._times.period, left))
            left = self._left()
            if left <= 0 or await self._try(within=min(self._times.deadline / 2, left)):
                continue
            if self.standby:
                raise LeadershipLost(f"{self} is held by {self._holder}")

    async def release(self) -> None:
        """Lets the next process lead at once. Best effort: without it the lease runs out, as one does that was lost."""
        if self._left() <= 0:
            return
        try:
            async with asyncio.timeout(self._times.deadline / 2):
                lease = await self._read()
                if lease is None or lease.spec is None or lease.spec.holder_identity != self._identity:
                    return
                lease.spec = self._spec(lease.spec, holder=None)
                await self._leases.replace_namespaced_lease(self._name, self._namespace, lease)
        except _FAULTS as error:
            logger.warning("%s was not released, it runs out by itself: %s", self, _told(error))

    def _left(self) -> float:
        return self._renewed + self._times.deadline - self._clock()

    async def _try(self, *, within: float) -> bool:
        """Whether this process holds the lease now; `within` are seconds of patience with the API server."""
        begun = self._clock()
        try:
            async with asyncio.timeout(within):
                held = await self._claim()
        except _FAULTS as error:
            logger.warning("%s: %s", self, _told(error))
            return False
        if held:
            self._renewed = begun
        return held

    async def _claim(self) -> bool:
        """Raises what the request raises; a conflict (somebody else was faster) among them."""
        lease = await self._read()
        spec = None if lease is None else lease.spec or V1LeaseSpec()
        self._holder = None if spec is None else spec.holder_identity
        claim = self._election.decide(None if spec is None else _held(spec), now=self._clock())
        if claim is Claim.WAIT:
            return False
        if lease is None or spec is None:
            made = V1Lease(metadata=V1ObjectMeta(name=self._name), spec=self._spec(None, holder=self._identity))
            await self._leases.create_namespaced_lease(self._namespace, made)
        else:
            # The lease carries the version it was read with, so of two that take it one is refused.
            lease.spec = self._spec(spec, holder=self._identity)
            await self._leases.replace_namespaced_lease(self._name, self._namespace, lease)
        self._holder = self._identity
        return True

    async def _read(self) -> V1Lease | None:
        try:
            return await self._leases.read_namespaced_lease(self._name, self._namespace)
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def _spec(self, before: V1LeaseSpec | None, *, holder: str | None) -> V1LeaseSpec:
        now = _micro_time(datetime.now(UTC))
        same = before is not None and before.holder_identity == holder
        acquired = before.acquire_time if before is not None and (same or holder is None) else None
        transitions = (before.lease_transitions or 0) if before is not None else 0
        return V1LeaseSpec(
            holder_identity=holder,
            lease_duration_seconds=self._times.duration,
            acquire_time=_micro_time(acquired) if acquired is not None else now,
            renew_time=now,
            lease_transitions=transitions + (0 if same or holder is None or before is None else 1),
        )


def _held(spec: V1LeaseSpec) -> Held:
    duration = spec.lease_duration_seconds
    return Held(
        holder=spec.holder_identity or None,
        renewed=None if spec.renew_time is None else str(spec.renew_time),
        duration=None if duration is None else float(duration),
    )


def _micro_time(moment: datetime) -> datetime:
    """Kubernetes' MicroTime has six digits, and isoformat, by which the client writes it, leaves out six zeros."""
    return moment.replace(microsecond=moment.microsecond or 1)


def _told(error: BaseException) -> str:
    if isinstance(error, ApiException):
        return f"{error.status} {error.reason}"
    return str(error) or type(error).__name__

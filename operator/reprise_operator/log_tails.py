"""The ends of the logs of containers that have ended, each read once.

The kubelet's message holds the last 2 KiB of a log. vLLM's cause is further up: its engine is a process of its own, and
the last to speak is the API server, which only says that the engine is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from reprise_operator.api import ClusterError, Fault
from reprise_operator.cause import without_secrets
from reprise_operator.children.pod import CONTAINER
from reprise_operator.observed import ObservedPod, Termination

logger = logging.getLogger(__name__)

Read = Callable[[str, str, str], Awaitable[str]]
"""(namespace, pod, container) → the end of the log of the container's previous run. Raises ClusterError."""

READ_AT_A_TIME = 4
"""In one pass over a service; the others' turn comes with the next. A crash of all replicas at once is one story."""


class LogTails:
    def __init__(self) -> None:
        self._tails: dict[tuple[str, str], str] = {}

    async def observe(self, namespace: str, pods: Sequence[ObservedPod], *, read: Read) -> tuple[ObservedPod, ...]:
        """The pods, their engines' failed ends with the end of the log."""
        ends = ((pod, end) for pod in pods for end in pod.terminations if _is_wanted(end))
        unread = [(pod, end) for pod, end in ends if _key(pod, end) not in self._tails][:READ_AT_A_TIME]
        tails = await asyncio.gather(*(_tail(read, namespace, pod, end) for pod, end in unread))
        for (pod, end), tail in zip(unread, tails, strict=True):
            if tail is not None:
                self._tails[_key(pod, end)] = tail
        return tuple(
            replace(
                pod,
                terminations=tuple(replace(end, log=self._tails.get(_key(pod, end), "")) for end in pod.terminations),
            )
            for pod in pods
        )

    def forget(self, uids: Iterable[str]) -> None:
        """Drops what is known of pods that are gone."""
        gone = set(uids)
        if gone:
            self._tails = {key: tail for key, tail in self._tails.items() if key[0] not in gone}


async def _tail(read: Read, namespace: str, pod: ObservedPod, end: Termination) -> str | None:
    """Without what looks like a credential, since a line of it may come into the status. None where it is worth another
    try."""
    try:
        return without_secrets(await read(namespace, pod.name, end.container))
    except ClusterError as error:
        logger.info("%s/%s: the log of %s cannot be read: %s", namespace, pod.name, end.container, error)
        return None if error.fault is Fault.UNAVAILABLE else ""


def _is_wanted(end: Termination) -> bool:
    # While the container has not been started again its log is not the previous one yet; that is a matter of seconds.
    return end.container == CONTAINER and end.exit_code != 0 and end.reason != "OOMKilled" and end.is_previous


def _key(pod: ObservedPod, end: Termination) -> tuple[str, str]:
    return pod.uid, end.container_id

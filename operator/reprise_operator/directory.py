"""Which InferenceService the pods of a name belong to.

A pod carries the name of its owner's children (label values are short), not the owner's own. Learnt from the watch and
from every reconcile, forgotten when a read has found the service gone: an event of its deletion may never come, if the
watch was away at that time.
"""

from __future__ import annotations

from collections.abc import Iterable

from reprise_operator.cluster import Key
from reprise_operator.naming import child_name
from reprise_operator.resource import Identity


class Directory:
    def __init__(self) -> None:
        self._by_label: dict[tuple[str, str], Key] = {}
        self._labels: dict[Key, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._labels)

    def learn(self, identity: Identity) -> None:
        """The service is there."""
        key = Key(identity.namespace, identity.name)
        self._labels[key] = label = (identity.namespace, child_name(identity))
        self._by_label[label] = key

    def forget(self, key: Key) -> None:
        """The service is gone."""
        label = self._labels.pop(key, None)
        if label is not None:
            self._by_label.pop(label, None)

    def owner(self, namespace: str, label: str | None) -> Key | None:
        """Of the pods or children that carry `label`, the value of naming.NAME_LABEL."""
        return None if label is None else self._by_label.get((namespace, label))

    def absent_from(self, listed: Iterable[Key]) -> frozenset[Key]:
        """The services known here that a listing lacks: gone, or made after it. A read of each tells."""
        return frozenset(self._labels) - frozenset(listed)

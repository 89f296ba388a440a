"""CRDs of other projects, trimmed (data/crds), on the API server of the tests: installed and taken away again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from reprise_operator.kinds import FOREIGN_TYPES, ResourceType
from tests.support.kubectl import Kubectl, KubectlFailed, eventually
from tests.support.plain_requests import answers

CRDS = Path(__file__).parent / "data" / "crds"


def _name(kind: ResourceType) -> str:
    return f"{kind.plural}.{kind.group}"


def is_served(kubectl: Kubectl, kind: ResourceType) -> bool:
    return answers(kubectl.kubeconfig, kind.path(kubectl.namespace))


def _is_gone(kubectl: Kubectl, kind: ResourceType) -> bool:
    return not is_served(kubectl, kind)


def install(kubectl: Kubectl, *kinds: ResourceType) -> None:
    for kind in kinds:
        # On the server's side: the annotation of a client-side apply has no room for it.
        kubectl("apply", "--server-side", "-f", str(CRDS / f"{kind.plural}.yaml"))
    for kind in kinds:
        eventually(partial(is_served, kubectl, kind), f"{_name(kind)} is served")


def remove(kubectl: Kubectl, *kinds: ResourceType) -> None:
    names = [_name(kind) for kind in kinds if is_served(kubectl, kind)]
    if names:
        kubectl("delete", "crd", *names, "--timeout=50s")
    for kind in kinds:
        eventually(partial(_is_gone, kubectl, kind), f"{_name(kind)} is gone")


@contextmanager
def none_left(kubectl: Kubectl) -> Iterator[None]:
    """None of the kinds before, and none after: the API server is everybody's."""
    remove(kubectl, *FOREIGN_TYPES)
    try:
        yield
    finally:
        with contextlib.suppress(KubectlFailed):
            remove(kubectl, *FOREIGN_TYPES)

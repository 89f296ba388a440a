"""Containers that do not run, as observe.py reads them of a pod."""

from __future__ import annotations

from reprise_operator.observed import ContainerFailure


def failure(
    reason: str, *, words: str = "", code: int | None = None, restarts: int = 3, container: str = "engine"
) -> ContainerFailure:
    return ContainerFailure(
        container=container,
        reason=reason,
        message=words,
        exit_code=code,
        terminated_reason=None if code is None else "Error",
        restart_count=restarts,
    )

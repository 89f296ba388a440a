"""What GitOps tools make of an object, by their own published rules: kstatus (Flux, `kubectl wait` of kpt) and Argo CD.

Written anew from their sources' order of questions, so that our statuses are judged by them and not by ourselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ARGOCD = Path(__file__).resolve().parents[2] / "examples" / "argocd"
HEALTH_LUA = ARGOCD / "resource_customizations" / "serving.reprise.io" / "InferenceService" / "health.lua"
HEALTH_KEY = "resource.customizations.health.serving.reprise.io_InferenceService"

Body = Mapping[str, Any]


def kstatus(body: Body) -> str:
    """Terminating, InProgress, Failed or Current. The conditions are gone through in the order they stand in."""
    metadata, status = body["metadata"], body.get("status") or {}
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    if "generation" in metadata and status.get("observedGeneration", metadata["generation"]) != metadata["generation"]:
        return "InProgress"
    conditions = status.get("conditions") or ()
    for condition in conditions:
        if (condition["type"], condition["status"]) == ("Reconciling", "True"):
            return "InProgress"
        if (condition["type"], condition["status"]) == ("Stalled", "True"):
            return "Failed"
    for condition in conditions:
        if condition["type"] == "Ready":
            return "Current" if condition["status"] == "True" else "InProgress"
    return "Current"


class ArgoCD:
    """Runs the health script as Argo CD does: Lua 5.1 with the base and table libraries alone."""

    def __init__(self, script: str | None = None) -> None:
        lua51 = pytest.importorskip("lupa.lua51", reason="executes Argo CD's Lua; install lupa (the test extra)")
        self._runtime = lua51.LuaRuntime(register_eval=False, register_builtins=False)
        # `string` stays, since without it lupa cannot convert; it is hidden from the script.
        self._runtime.execute("io, os, math, debug, package, require, dofile, loadfile, string, python = nil")
        self._run = self._runtime.compile(HEALTH_LUA.read_text() if script is None else script)

    def health(self, body: Body) -> tuple[str, str]:
        """(status, message) of an object."""
        if body["metadata"].get("deletionTimestamp"):
            return "Progressing", "Pending deletion"  # decided before any script is asked
        self._runtime.globals()["obj"] = self._table(body)
        answer = self._run()
        return str(answer["status"]), str(answer["message"])

    def _table(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return self._runtime.table_from({key: self._table(item) for key, item in value.items()})
        if isinstance(value, list | tuple):
            return self._runtime.table_from([self._table(item) for item in value])
        # Numbers are doubles there.
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def script_of_config_map() -> str:
    """The health script as it is merged into Argo CD's own ConfigMap."""
    loaded: Mapping[str, Any] = yaml.safe_load((ARGOCD / "argocd-cm.yaml").read_text())
    return str(loaded["data"][HEALTH_KEY])

"""Policy, text and server start without torch: the API process is there at once, and needs none of its memory."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "config",
        "request",
        "errors",
        "step",
        "messages",
        "scheduler",
        "loop",
        "kv.manager",
        "tiers",
        "text",
        "server",
        "bench",
        "fetch",
    ],
)
def test_importing_leaves_torch_out(module: str) -> None:
    # Every module below a package too: the package alone may be empty.
    program = f"""
import importlib, pkgutil, sys
module = importlib.import_module("reprise_engine.{module}")
for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
    importlib.import_module(found.name)
print(sorted(sys.modules.keys() & {{"torch", "torch_npu", "transformers"}}))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"

"""The meta functions that the wheel registers for its operators: shapes and dtypes of results, without a device.

Their module imports torch_npu, so its source is compiled without those imports, with stand-ins for what they bring.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable
from typing import Any

from tests.support.npu.wheel import read

MODULE = "torch_npu/op_plugin/meta/_meta_registrations.py"


class _Anything:
    """Stands for torch_npu: every attribute is a number of its own, which no argument of ours equals."""

    def __init__(self) -> None:
        self._numbers = itertools.count(10_000)

    def __getattr__(self, name: str) -> int:
        number = next(self._numbers)
        setattr(self, name, number)
        return number


@functools.cache
def meta_functions() -> dict[str, Callable[..., Any]]:
    """By the operator's name; raises WheelMissing."""
    tree = ast.parse(read(MODULE), MODULE)
    tree.body = [statement for statement in tree.body if not _needs_torch_npu(statement)]
    registered: dict[str, Callable[..., Any]] = {}

    def impl(library: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            if library == "npu":
                registered[name] = function
            return function

        return register

    scope: dict[str, Any] = {
        "__name__": "meta_registrations",
        "torch_npu": _Anything(),
        "Library": lambda namespace, kind, key: namespace,
        "impl": impl,
        "ErrCode": _Anything(),
        "ops_error": str,
        "get_cann_version": lambda module="CANN": "9.9",
        "get_soc_version": lambda: 225,
    }
    exec(compile(tree, MODULE, "exec"), scope)
    return registered


def _needs_torch_npu(statement: ast.stmt) -> bool:
    """Its imports, and marks on operators that are not defined here."""
    if isinstance(statement, ast.Import):
        return any(alias.name.startswith("torch_npu") for alias in statement.names)
    if isinstance(statement, ast.ImportFrom):
        return (statement.module or "").startswith(("torch_npu", "torch.library", "torch.fx"))
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return isinstance(statement.value.func, ast.Name) and statement.value.func.id == "has_side_effect"
    return False

"""Reprise engine: prefix-caching LLM inference.

`from reprise_engine import LLM, SamplingParams` is the offline interface. Importing the package imports no torch;
`LLM` is resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reprise_engine.request import SamplingParams, StructuredOutput
from reprise_engine.version import __version__

if TYPE_CHECKING:
    from reprise_engine.entrypoints.llm import LLM

__all__ = ["LLM", "SamplingParams", "StructuredOutput", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from reprise_engine.entrypoints.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The version, in a module that imports nothing: the package itself leads to `LLM`, and so to torch."""

from __future__ import annotations

__version__ = "0.1.0"

"""Sampling where a request says nothing: the model's generation_config.json, as vLLM's --generation-config has it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from reprise_engine.errors import ConfigError
from reprise_engine.text.files import model_folder, read_json, resolve_model

_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "top_k": (-1, math.inf),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (math.ulp(0.0), math.inf),  # above 0
    "max_tokens": (1, math.inf),
}
"""Least and largest value of each, as of `SamplingParams`: what is outside would fail every request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """OpenAI's own where no file says otherwise. `max_tokens` None: as many as fit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    def overridden(self, values: Mapping[str, Any], *, source: str) -> SamplingDefaults:
        """With the values of a generation_config; those that are None or no sampling parameter say nothing.

        Raises ConfigError naming `source` for a value of the wrong type.
        """
        found: dict[str, Any] = {}
        for field in fields(self):
            key = "max_new_tokens" if field.name == "max_tokens" else field.name
            value = values.get(key)
            if value is None:
                continue
            whole = field.name in ("top_k", "max_tokens")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise ConfigError(f"{source}: {key} is {value!r}; it must be {'a whole' if whole else 'a'} number.")
            lowest, highest = _RANGES[field.name]
            if not math.isfinite(value) or not lowest <= value <= highest:
                raise ConfigError(f"{source}: {key} is {value!r}, which is out of range.")
            found[field.name] = int(value) if whole else float(value)
        return replace(self, **found)

    def described(self) -> str:
        """The values that differ from OpenAI's, for the log."""
        plain = SamplingDefaults()
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(plain, field.name)
        ]
        return ", ".join(changed) or "OpenAI's"


def load_defaults(
    model: str, *, source: str = "auto", revision: str | None = None, override: Mapping[str, Any] | None = None
) -> SamplingDefaults:
    """`source` is auto (the model's folder), vllm (nobody's: OpenAI's defaults) or a folder.

    Raises ModelNotFound, ModelError, ConfigError.
    """
    defaults = SamplingDefaults()
    if source != "vllm":
        folder = model_folder(resolve_model(model, revision=revision)) if source == "auto" else Path(source)
        file = folder / "generation_config.json"
        values = read_json(file)
        if values is None and source != "auto":
            raise ConfigError(f"--generation-config is {source!r}, but {file} does not exist.")
        defaults = defaults.overridden(values or {}, source=str(file))
    return defaults.overridden(override or {}, source="--override-generation-config")

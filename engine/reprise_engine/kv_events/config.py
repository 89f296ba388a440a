"""`--kv-events-config`: vLLM's keys and defaults, checked before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from reprise_engine.errors import ConfigError

FLAG = "--kv-events-config"

Encoding = Literal["map", "array"]

_TCP = re.compile(r"tcp://(?P<host>[^\s/]+):(?P<port>\d{1,5})")
_IPC = re.compile(r"ipc://(?!\*$)\S+")  # with * ZeroMQ draws a name that nobody knows


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Where events of the KV cache are published. Off by default."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    """None: "zmq" where events are enabled."""
    endpoint: str = "tcp://*:5557"
    """Bound where it names every address (`*`, `0.0.0.0`, `[::]`) or a file (`ipc://`); otherwise connected to."""
    replay_endpoint: str | None = None
    """Always bound."""
    buffer_steps: int = 10_000
    """Batches that can be replayed one by one; older ones come summed up."""
    hwm: int = 100_000
    """Batches that wait for one consumer; what comes on top is lost for it."""
    max_queue_size: int = 100_000
    """Batches that wait to be published."""
    topic: str = ""
    encoding: Encoding = "map"
    """Of an event. Our own key: vLLM writes maps since June 2026; consumers made before that read arrays."""

    def __post_init__(self) -> None:
        self._check_type("enable_kv_cache_events", bool, "true or false")
        self._check_choice("publisher", ("null", "zmq", None))
        self._check_choice("encoding", get_args(Encoding))
        self._check_type("topic", str, "a text")
        for name, least in (("buffer_steps", 0), ("hwm", 1), ("max_queue_size", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 2**31:
                raise _refused(name, value, f"a whole number of at least {least}")
        _check_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _check_endpoint("replay_endpoint", self.replay_endpoint)
            if self.replay_endpoint == self.endpoint:
                raise _refused("replay_endpoint", self.replay_endpoint, "another one than endpoint")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> KVEventsConfig:
        """Raises ConfigError for an unknown key, or a value that cannot be honoured."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(f"{FLAG} has the unknown key {name!r}; there are {', '.join(known)}.")
        return cls(**values)

    @property
    def active(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def binds(self) -> bool:
        """Whether `endpoint` is bound: vLLM's rule."""
        return self.endpoint.startswith(("ipc://", "tcp://0.0.0.0:")) or "*" in self.endpoint or "::" in self.endpoint

    def _check_type(self, name: str, kind: type, what: str) -> None:
        if type(getattr(self, name)) is not kind:
            raise _refused(name, getattr(self, name), what)

    def _check_choice(self, name: str, choices: tuple[str | None, ...]) -> None:
        if getattr(self, name) not in choices:
            names = [f'"{choice}"' for choice in choices if choice is not None]
            raise _refused(name, getattr(self, name), " or ".join(names))


def _check_endpoint(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise _refused(name, value, "a text such as tcp://*:5557")
    if _IPC.fullmatch(value):
        return
    match = _TCP.fullmatch(value)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise _refused(name, value, "tcp://ADDRESS:PORT, such as tcp://*:5557, or ipc://PATH")


def _refused(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{FLAG}: {name} is {value!r}; it must be {allowed}.")

"""Errors of the engine.

    RepriseError
    ├── ConfigError            a flag or field is wrong: exit code 2 at start-up
    ├── ModelError             the model folder cannot be served
    │   ├── ModelNotFound
    │   ├── DamagedModel       (a file of it is cut off, empty, or not what it should be)
    │   └── UnsupportedModel   (architecture, multimodal, RoPE scaling …)
    ├── FetchError             `reprise fetch` could not bring the model
    │   ├── ModelFetchDenied       the hub or bucket wants other credentials
    │   ├── ModelFetchFailed       it could not be reached, or kept breaking off
    │   ├── ModelVolumeFull        the volume has no room
    │   └── ModelVolumeUnusable    the volume cannot be written, or cannot lock files
    ├── DeviceError            the NPU cannot be used: driver, CANN, or somebody else has it (npu_troubles.py)
    ├── InsufficientMemory     not one sequence fits
    ├── OutOfMemory            memory ran out, of the device or of the host (out_of_memory.py)
    ├── RequestError           one request is wrong: HTTP 400, nothing else stops
    │   └── ContextLengthExceeded
    ├── NotFinite              the model computed no numbers for a request: HTTP 500, nothing else stops
    ├── SlowReader             a client leaves too many outputs unread: its request is aborted
    └── EngineDead             the engine process is gone: its requests get HTTP 500, /health fails
        ├── EngineStopped      it was told to end, or does not serve yet: HTTP 503
        └── RankDied           one of the ranks that compute together is gone, and so they all are

A message names the field, its value, the limit and what to do.
"""

from __future__ import annotations


class RepriseError(Exception):
    """Base of every error that Reprise raises on purpose."""


class ConfigError(RepriseError):
    """A flag or configuration field has a value that cannot be honoured."""


class ModelError(RepriseError):
    """The model cannot be served."""


class ModelNotFound(ModelError):
    """The path or file of the model does not exist."""


class DamagedModel(ModelError):
    """The model exists, but a file of it cannot be read."""


class UnsupportedModel(ModelError):
    """The model exists, but its architecture or configuration is not supported."""


class FetchError(RepriseError):
    """The model could not be fetched. A file that is not there is a ModelNotFound, one that is not what it should be a
    DamagedModel."""


class ModelFetchDenied(FetchError):
    """The hub or bucket refuses the credentials, or wants some."""


class ModelFetchFailed(FetchError):
    """The hub or bucket could not be reached or kept breaking off, through all retries."""


class ModelVolumeFull(FetchError):
    """The volume has no room for the model."""


class ModelVolumeUnusable(FetchError):
    """The volume cannot be written, or cannot lock files."""


class DeviceError(RepriseError):
    """The NPU is there, or should be, but cannot be used. No flag cures it, so the exit code is not a usage error's."""


class InsufficientMemory(RepriseError):
    """The memory left for the KV cache does not hold one sequence of max_model_len."""


class OutOfMemory(RepriseError):
    """Memory ran out. The message begins with `memory=npu|host phase=…:`, see out_of_memory.py."""


class RequestError(RepriseError):
    """A request cannot be honoured. `param` names the field, `code` is OpenAI's machine-readable code."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        # Crosses the process boundary: keyword-only arguments need their own way back.
        return (_rebuild_request_error, (type(self), self.message, self.param, self.code))


def _rebuild_request_error(cls: type[RequestError], message: str, param: str | None, code: str | None) -> RequestError:
    return cls(message, param=param, code=code)


class ContextLengthExceeded(RequestError):
    """Prompt (plus max_tokens) does not fit max_model_len, or the prompt can never fit the KV pool."""


class NotFinite(RepriseError):
    """What the model computed for a request is not finite: nothing can be chosen from it."""


class SlowReader(RepriseError):
    """A client takes its outputs more slowly than they are generated, and more of them wait than are held for it."""


class EngineDead(RepriseError):
    """The engine process has ended by itself. The server ends too, to be restarted."""


class EngineStopped(EngineDead):
    """The engine process does not serve: it loads, or was told to end."""


class RankDied(EngineDead):
    """A rank of --tensor-parallel-size has ended, or failed: the others cannot go on without it."""

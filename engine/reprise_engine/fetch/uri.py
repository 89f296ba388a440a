"""What `reprise fetch` is told to bring: `hf://org/name[@rev]`, `modelscope://org/name[@rev]`, `s3://bucket/path`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from reprise_engine.errors import ConfigError

Hub = Literal["hf", "modelscope"]

_HUB = re.compile(r"^(?P<hub>hf|modelscope)://(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[^@\s]+))?$", re.ASCII)
_S3 = re.compile(r"^s3://(?P<bucket>[^/\s]+)(/(?P<path>.*))?$", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A repository of a model hub; `revision` None takes the hub's default branch."""

    hub: Hub
    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        at = "" if self.revision is None else f"@{self.revision}"
        return f"{self.hub}://{self.repository}{at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketModel:
    """A folder of a bucket, or one .gguf file. `path` has no slash at its ends and may be empty."""

    bucket: str
    path: str = ""

    def __str__(self) -> str:
        return f"s3://{self.bucket}" + (f"/{self.path}" if self.path else "")


ModelUri = HubModel | BucketModel


def parse_uri(text: str, *, revision: str | None = None) -> ModelUri:
    """Reads a URI. `revision` is the flag's value: of a hub's model only, and not beside an @revision that differs.

    Raises ConfigError.
    """
    if match := _HUB.match(text):
        named = match["revision"]
        if named is not None and revision is not None and named != revision:
            raise ConfigError(f"--revision is {revision}, but {text} names {named}; give one of them.")
        hub: Hub = "hf" if match["hub"] == "hf" else "modelscope"
        if set(match["repository"].split("/")) & {".", ".."}:
            raise ConfigError(f"{text!r} names no repository; it must be {hub}://org/name.")
        return HubModel(hub=hub, repository=match["repository"], revision=named or revision)
    if match := _S3.match(text):
        path = (match["path"] or "").strip("/")
        if ".." in path.split("/") or "\0" in path:
            raise ConfigError(f"{text!r} must not contain '..'.")
        if revision is not None:
            raise ConfigError(f"--revision is {revision}, but {text} is a bucket, which has none; leave it out.")
        return BucketModel(bucket=match["bucket"], path=path)
    raise ConfigError(
        f"the model is {text!r}; it must be hf://org/name[@revision], modelscope://org/name[@revision] or "
        "s3://bucket/path."
    )

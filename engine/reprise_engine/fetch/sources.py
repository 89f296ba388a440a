"""Where models are fetched from: the interface, and the two hubs. Buckets are in bucket.py.

Both hubs are asked over their plain HTTP API. Their client libraries would resume and report in ways of their own, each
another; and what all of them lack, the comparison of every file with the digest the hub lists, is made in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import aiohttp

from reprise_engine.errors import ConfigError, ModelNotFound
from reprise_engine.fetch.files import Digest, Listing, RemoteFile
from reprise_engine.fetch.uri import HubModel
from reprise_engine.fetch.web import Request, Transient, get_json

HUGGING_FACE = "https://huggingface.co"
MODELSCOPE = "https://modelscope.cn"


class Source(Protocol):
    """One model at the place it comes from."""

    async def list(self) -> Listing:
        """All its files. Raises Transient, ModelFetchDenied, ModelNotFound."""

    async def request(self, file: RemoteFile, listing: Listing) -> Request:
        """How to get one of them; asked anew for each attempt, since links expire. Raises as `list`."""


def endpoint(environment: Mapping[str, str], variable: str, default: str) -> str:
    """The hub's address: that of a mirror where `variable` says so. Raises ConfigError."""
    value = (environment.get(variable) or default).rstrip("/")
    if "://" not in value:
        value = f"https://{value}"
    if not value.startswith(("http://", "https://")):
        raise ConfigError(f"${variable} is {value!r}; it must be an http or https address, such as {default}.")
    return value


class HuggingFace:
    """The Hugging Face hub, or a mirror of it ($HF_ENDPOINT), with $HF_TOKEN where there is one."""

    def __init__(self, model: HubModel, session: aiohttp.ClientSession, environment: Mapping[str, str]) -> None:
        self._model = model
        self._session = session
        self._endpoint = endpoint(environment, "HF_ENDPOINT", HUGGING_FACE)
        token = environment.get("HF_TOKEN", "").strip()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def list(self) -> Listing:
        revision = quote(self._model.revision or "main", safe="")
        url = f"{self._endpoint}/api/models/{self._model.repository}/revision/{revision}?blobs=true"
        what = str(self._model)
        answer = await get_json(self._session, Request(url=url, headers=self._headers), what=what)
        try:
            files = tuple(_hugging_face_file(entry) for entry in answer["siblings"])
            return Listing(files=files, revision=str(answer["sha"]))
        except (KeyError, TypeError, ValueError) as error:
            raise Transient(
                f"{what}: the listing is not of the hub's form ({error!r}); is $HF_ENDPOINT right?"
            ) from error

    async def request(self, file: RemoteFile, listing: Listing) -> Request:
        path = f"{self._model.repository}/resolve/{listing.revision}/{quote(file.path)}"
        return Request(url=f"{self._endpoint}/{path}", headers=self._headers)


def _hugging_face_file(entry: Mapping[str, Any]) -> RemoteFile:
    large = entry.get("lfs")
    if large:
        digest = Digest(algorithm="sha256", value=str(large["sha256"]).lower())
        size = int(large["size"])
    else:
        digest = Digest(algorithm="git-sha1", value=str(entry["blobId"]).lower())
        size = int(entry["size"])
    return RemoteFile(path=str(entry["rfilename"]), size=size, identity=digest.value, digest=digest)


class ModelScope:
    """ModelScope ($MODELSCOPE_ENDPOINT for another address), with $MODELSCOPE_API_TOKEN where there is one."""

    def __init__(self, model: HubModel, session: aiohttp.ClientSession, environment: Mapping[str, str]) -> None:
        self._model = model
        self._session = session
        self._endpoint = endpoint(environment, "MODELSCOPE_ENDPOINT", MODELSCOPE)
        token = environment.get("MODELSCOPE_API_TOKEN", "").strip()
        # Its own client sends the token as the cookie of a session.
        self._headers = {"Cookie": f"m_session_id={token}", "Authorization": f"Bearer {token}"} if token else {}
        self._api = f"{self._endpoint}/api/v1/models/{model.repository}"
        self._revision = model.revision or "master"

    async def list(self) -> Listing:
        url = f"{self._api}/repo/files?{urlencode({'Revision': self._revision, 'Recursive': 'True'})}"
        what = str(self._model)
        answer = await get_json(self._session, Request(url=url, headers=self._headers), what=what)
        try:
            if answer["Code"] != 200:
                raise ModelNotFound(
                    f"{what}: {answer.get('Message') or answer['Code']}. Check the name and the revision in "
                    "spec.model.uri, and spec.model.secretRef if it is not public."
                )
            entries = [entry for entry in answer["Data"]["Files"] if entry["Type"] == "blob"]
            return Listing(files=tuple(_modelscope_file(entry) for entry in entries))
        except (KeyError, TypeError, ValueError) as error:
            raise Transient(
                f"{what}: the listing is not of the hub's form ({error!r}); is $MODELSCOPE_ENDPOINT right?"
            ) from error

    async def request(self, file: RemoteFile, listing: Listing) -> Request:
        query = urlencode({"Revision": self._revision, "FilePath": file.path})
        return Request(url=f"{self._api}/repo?{query}", headers=self._headers)


def _modelscope_file(entry: Mapping[str, Any]) -> RemoteFile:
    digest = Digest(algorithm="sha256", value=str(entry["Sha256"]).lower())
    return RemoteFile(path=str(entry["Path"]), size=int(entry["Size"]), identity=digest.value, digest=digest)

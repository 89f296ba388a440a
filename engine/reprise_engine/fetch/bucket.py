"""Models in buckets that speak the S3 protocol: AWS, MinIO, Ceph, OBS.

The minio SDK lists, and signs a link for each request; the bytes come as those of a hub do, so they are resumed,
verified and counted in the same place.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import TypeVar
from xml.etree.ElementTree import ParseError

from minio import InvalidResponseError, Minio, S3Error, ServerError
from minio.helpers import check_bucket_name, check_object_name
from urllib3.exceptions import HTTPError

from reprise_engine.errors import ModelFetchDenied, ModelNotFound
from reprise_engine.fetch.bucket_client import connect, read_server
from reprise_engine.fetch.files import Digest, Listing, RemoteFile
from reprise_engine.fetch.uri import BucketModel
from reprise_engine.fetch.web import Request, Transient

LINK_LIFETIME = timedelta(hours=1)
"""A link must be valid when a request begins, not until it ends."""
_MD5 = re.compile(r"^[0-9a-f]{32}$")
_DENIED = frozenset(
    {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "401", "403"}
)
_ABSENT = frozenset({"NoSuchBucket", "NoSuchKey", "InvalidBucketName", "404"})

T = TypeVar("T")


class Bucket:
    """One model in a bucket. $AWS_ENDPOINT_URL names a server other than AWS, $AWS_REGION the region.

    Raises ConfigError and ModelNotFound for an address or a name that cannot be.
    """

    def __init__(self, model: BucketModel, environment: Mapping[str, str]) -> None:
        self._model = model
        self._environment = environment
        self._server = read_server(environment)
        try:
            check_bucket_name(model.bucket)
            if model.path:
                check_object_name(model.path)
        except ValueError as error:
            raise ModelNotFound(f"{model}: {error}. Check the bucket and the path in spec.model.uri.") from error

    async def list(self) -> Listing:
        files = await asyncio.to_thread(_translated, self._model, self._list)
        return Listing(files=files)

    async def request(self, file: RemoteFile, listing: Listing) -> Request:
        def sign() -> str:
            key = self._key(file.path)
            return self._client.presigned_get_object(self._model.bucket, key, expires=LINK_LIFETIME)

        # Parts of two versions of an object must never end up in one file.
        return Request(
            url=await asyncio.to_thread(_translated, self._model, sign), headers={"If-Match": f'"{file.identity}"'}
        )

    @cached_property
    def _client(self) -> Minio:
        """Made in a thread, since it may ask the instance for its role."""
        return connect(self._server, self._environment)

    def _key(self, path: str) -> str:
        return "/".join(part for part in (self._folder, path) if part)

    @property
    def _folder(self) -> str:
        """Of a .gguf file its folder."""
        path = self._model.path
        return path.rpartition("/")[0] if path.lower().endswith(".gguf") else path

    def _list(self) -> tuple[RemoteFile, ...]:
        try:
            return self._heads()
        except S3Error as error:
            # AWS tells where a bucket is to whoever asks in another region.
            region = error.response.headers.get("x-amz-bucket-region")
            if region is None or region == self._server.region:
                raise
            self._server = replace(self._server, region=region)
            del self._client
            return self._heads()

    def _heads(self) -> tuple[RemoteFile, ...]:
        files = tuple(self._head(key, path) for key, path in self._keys())
        if not files:
            raise ModelNotFound(f"{self._model} holds no object. Check the bucket and the path in spec.model.uri.")
        return files

    def _keys(self) -> Iterator[tuple[str, str]]:
        """(key, path in the model's folder). Folders below it are left out: engines read none."""
        if self._model.path.lower().endswith(".gguf"):
            yield self._model.path, self._model.path.rpartition("/")[2]
            return
        prefix = f"{self._model.path}/" if self._model.path else ""
        for item in self._client.list_objects(self._model.bucket, prefix=prefix):
            key = item.object_name or ""
            path = key.removeprefix(prefix)
            if path not in ("", ".", "..") and not path.endswith("/"):
                yield key, path

    def _head(self, key: str, path: str) -> RemoteFile:
        answer = self._client.stat_object(self._model.bucket, key, extra_headers={"x-amz-checksum-mode": "ENABLED"})
        headers: Mapping[str, str] = answer.metadata or {}
        if not answer.etag or answer.size is None or "content-length" not in headers:
            raise Transient(f"{self._model}: the server tells no size or no ETag of {path}; is it an S3 server?")
        return RemoteFile(path=path, size=answer.size, identity=answer.etag, digest=_digest(headers, answer.etag))


def _digest(headers: Mapping[str, str], tag: str) -> Digest | None:
    """The SHA-256 of the whole object where the store keeps one, else the MD5 that an ETag is: of an object that came
    in one piece and is not encrypted with a key of somebody's own."""
    checksum = headers.get("x-amz-checksum-sha256")
    if checksum and "-" not in checksum and headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT":
        return Digest(algorithm="sha256", value=base64.b64decode(checksum).hex())
    encrypted = (
        headers.get("x-amz-server-side-encryption", "").startswith("aws:kms")
        or "x-amz-server-side-encryption-customer-algorithm" in headers
    )
    return Digest(algorithm="md5", value=tag) if _MD5.match(tag) and not encrypted else None


def _translated(model: BucketModel, call: Callable[[], T]) -> T:
    """The answer of `call`, the SDK's errors turned into ours."""
    try:
        return call()
    except S3Error as error:
        raise _refusal(model, error.code or "", error.message) from error
    except ServerError as error:
        raise _refusal(model, str(error.status_code), None) from error
    except InvalidResponseError as error:  # a body that is not S3's: that of a proxy, or of no S3 server
        raise _refusal(model, str(error._code), None) from error
    except HTTPError as error:
        raise Transient(f"{model}: {type(error).__name__}") from error
    except (ValueError, ParseError) as error:
        raise Transient(f"{model}: the answer is not S3's; is $AWS_ENDPOINT_URL the API's address?") from error


def _refusal(model: BucketModel, code: str, message: str | None) -> Exception:
    words = f"{model}: {code}: {message or 'refused'}"
    if code in _DENIED:
        return ModelFetchDenied(
            f"{words}. Name a Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY that may list and read it in "
            "spec.model.secretRef, and set AWS_ENDPOINT_URL and AWS_REGION there or in spec.runtime.env where the "
            "bucket is not at AWS in us-east-1."
        )
    if code in _ABSENT:
        return ModelNotFound(f"{words}. Check the bucket and the path in spec.model.uri.")
    return Transient(words)

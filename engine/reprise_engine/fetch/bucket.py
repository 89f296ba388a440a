"""Models in buckets that speak the S3 protocol: AWS, MinIO, Ceph, OBS.

botocore lists, and signs a link for each request; the bytes come as those of a hub do, so they are resumed, verified
and counted in the same place. Credentials are botocore's own: $AWS_ACCESS_KEY_ID and $AWS_SECRET_ACCESS_KEY, the pod's
web identity, the instance's role; with none of them the bucket is asked without a signature, as a public one allows.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any

from reprise_engine.errors import ConfigError, ModelFetchDenied, ModelNotFound
from reprise_engine.fetch.files import Digest, Listing, RemoteFile
from reprise_engine.fetch.uri import BucketModel
from reprise_engine.fetch.web import CONNECT_SECONDS, SILENCE_SECONDS, Request, Transient

LINK_SECONDS = 3600
"""A link must be valid when a request begins, not until it ends."""
ADDRESSING_VARIABLE = "REPRISE_S3_ADDRESSING"
_ADDRESSING = ("auto", "path", "virtual")
_MD5 = re.compile(r"^[0-9a-f]{32}$")
_DENIED = frozenset(
    {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "401", "403"}
)
_ABSENT = frozenset({"NoSuchBucket", "NoSuchKey", "InvalidBucketName", "404"})


class Bucket:
    """One model in a bucket. $AWS_ENDPOINT_URL names a server other than AWS, $AWS_REGION the region."""

    def __init__(self, model: BucketModel, environment: Mapping[str, str]) -> None:
        self._model = model
        addressing = environment.get(ADDRESSING_VARIABLE) or "auto"
        if addressing not in _ADDRESSING:
            raise ConfigError(f"${ADDRESSING_VARIABLE} is {addressing!r}; it must be one of {', '.join(_ADDRESSING)}.")
        self._client = _translated(model, lambda: _client(environment, addressing))

    async def list(self) -> Listing:
        files = await asyncio.to_thread(_translated, self._model, self._list)
        return Listing(files=files)

    async def request(self, file: RemoteFile, listing: Listing) -> Request:
        parameters = {"Bucket": self._model.bucket, "Key": self._key(file.path)}

        def sign() -> str:
            return str(self._client.generate_presigned_url("get_object", Params=parameters, ExpiresIn=LINK_SECONDS))

        # Parts of two versions of an object must never end up in one file.
        return Request(
            url=await asyncio.to_thread(_translated, self._model, sign), headers={"If-Match": f'"{file.identity}"'}
        )

    def _key(self, path: str) -> str:
        return "/".join(part for part in (self._folder, path) if part)

    @property
    def _folder(self) -> str:
        """Of a .gguf file its folder."""
        path = self._model.path
        return path.rpartition("/")[0] if path.lower().endswith(".gguf") else path

    def _list(self) -> tuple[RemoteFile, ...]:
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
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._model.bucket, Prefix=prefix, Delimiter="/"
        )
        for page in pages:
            for item in page.get("Contents") or ():
                path = item["Key"].removeprefix(prefix)
                if path:
                    yield item["Key"], path

    def _head(self, key: str, path: str) -> RemoteFile:
        answer = self._client.head_object(Bucket=self._model.bucket, Key=key, ChecksumMode="ENABLED")
        tag = str(answer["ETag"]).strip('"')
        return RemoteFile(path=path, size=int(answer["ContentLength"]), identity=tag, digest=_digest(answer, tag))


def _digest(answer: Mapping[str, Any], tag: str) -> Digest | None:
    """The SHA-256 of the whole object where the store keeps one, else the MD5 that an ETag is: of an object that came
    in one piece and is not encrypted with a key of somebody's own."""
    checksum = answer.get("ChecksumSHA256")
    if checksum and "-" not in checksum and answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT":
        return Digest(algorithm="sha256", value=base64.b64decode(checksum).hex())
    encrypted = str(answer.get("ServerSideEncryption", "")).startswith("aws:kms") or "SSECustomerAlgorithm" in answer
    return Digest(algorithm="md5", value=tag) if _MD5.match(tag) and not encrypted else None


def _client(environment: Mapping[str, str], addressing: str) -> Any:
    try:
        import botocore.session  # takes a quarter of a second, and the hubs do without
        from botocore import UNSIGNED
        from botocore.config import Config
    except ImportError as error:
        raise ConfigError("s3:// needs the package botocore; the image of this release has it.") from error
    session = botocore.session.get_session()
    options: dict[str, Any] = {
        "signature_version": "s3v4" if session.get_credentials() is not None else UNSIGNED,
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": SILENCE_SECONDS,
        "retries": {"total_max_attempts": 1},  # run.py tries again
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    if addressing != "auto":
        options["s3"] = {"addressing_style": addressing}
    return session.create_client(
        "s3",
        region_name=environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1",
        endpoint_url=environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or None,
        config=Config(**options),
    )


def _translated(model: BucketModel, call: Any) -> Any:
    """The answer of `call`, botocore's errors turned into ours."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

    try:
        return call()
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        words = f"{model}: {code}: {error.response.get('Error', {}).get('Message') or 'refused'}"
        if code in _DENIED:
            raise ModelFetchDenied(
                f"{words}. Name a Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY that may list and read it in "
                "spec.model.secretRef, and set AWS_ENDPOINT_URL and AWS_REGION there or in spec.runtime.env where the "
                "bucket is not at AWS in us-east-1."
            ) from error
        if code in _ABSENT:
            raise ModelNotFound(f"{words}. Check the bucket and the path in spec.model.uri.") from error
        raise Transient(words) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise ModelFetchDenied(f"{model}: {error}. Check the keys of the Secret in spec.model.secretRef.") from error
    except BotoCoreError as error:
        raise Transient(f"{model}: {type(error).__name__}") from error

"""Where models come from, over real HTTP: a Hugging Face hub with its CDN, ModelScope and an S3 server, all of one set
of files; and ways to make them fail."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from base64 import b64encode
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from aiohttp import web

COMMIT = "c0ffee" * 6 + "c0ff"
PIECE = 64 * 1024
LARGE = (".safetensors", ".bin", ".gguf")
PAGE_KEYS = 2
SERVER = web.AppKey("server", str)
_XMLNS = "http://s3.amazonaws.com/doc/2006-03-01/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request for the bytes of a file, or for anything else (then `file` is empty)."""

    server: str
    """hub or cdn."""
    path: str
    file: str
    range: str | None
    authorization: str | None
    cookie: str | None


@dataclass(kw_only=True)
class ModelHub:
    """The files, and what is to go wrong. Figures of failures count down to none."""

    files: dict[str, bytes]
    token: str | None = None
    """Who does not send it is refused with 401."""
    access_key: tuple[str, str] | None = None
    """(id, secret) of the bucket; None lets everybody read."""
    session_token: str | None = None
    """Of temporary keys: it must come with each request to the bucket."""
    region: str = "us-east-1"
    """Of the bucket: requests signed for another one are told of it."""
    checksums: bool = False
    """Whether the bucket keeps SHA-256 digests."""
    web_identity: str | None = None
    """The token for which the service of tokens lends the bucket's keys."""
    instance_role: str | None = None
    """The role whose credentials, the bucket's keys, the instance's metadata give."""
    commit: str = COMMIT
    cuts: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """File → after how many bytes its next answers break off."""
    corrupt: dict[str, int] = field(default_factory=dict)
    """File → how many of its next answers have a wrong first byte."""
    refuse: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Status and headers of the next answers of the hub, whatever they were to be."""
    silent: dict[str, int] = field(default_factory=dict)
    """File → how many of its next answers stop in the middle and say nothing more."""
    ranges: bool = True
    pause: float = 0.0
    """Seconds between two pieces of a file."""
    gate: asyncio.Event | None = None
    """Answers stop after half of a large file until it is set."""
    sizes: dict[str, int] = field(default_factory=dict)
    """File → what the listing says its size is, where that is not true."""
    seen: list[Seen] = field(default_factory=list)
    asked: dict[str, list[str | None]] = field(default_factory=lambda: defaultdict(list))
    """File → the ranges it was sent for."""
    sent: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """File → bytes sent."""
    bucket: str = "models"
    prefix: str = "qwen"
    url: str = ""
    cdn_url: str = ""

    @property
    def hub_environment(self) -> dict[str, str]:
        """For a process that is to find all of them here."""
        return {
            "HF_ENDPOINT": self.url,
            "MODELSCOPE_ENDPOINT": self.url,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def routes(self, app: web.Application, *, server: str) -> None:
        app[SERVER] = server
        if server == "cdn":
            app.router.add_get("/cdn/{file:.+}", self._cdn)
            return
        app.router.add_get("/api/models/{org}/{name}/revision/{revision}", self._hf_listing)
        app.router.add_get("/{org}/{name}/resolve/{revision}/{file:.+}", self._hf_file)
        app.router.add_get("/api/v1/models/{org}/{name}/repo/files", self._ms_listing)
        app.router.add_get("/api/v1/models/{org}/{name}/repo", self._ms_file)
        app.router.add_post("/", self._sts)
        app.router.add_get("/v1/credentials", self._pod_identity)
        app.router.add_put("/latest/api/token", self._metadata)
        app.router.add_get("/latest/meta-data/iam/security-credentials/{role:.*}", self._metadata)
        app.router.add_get(f"/{self.bucket}", self._s3_list)
        app.router.add_route("HEAD", f"/{self.bucket}/{{key:.+}}", self._s3_object)
        app.router.add_route("GET", f"/{self.bucket}/{{key:.+}}", self._s3_object)

    # The Hugging Face hub -------------------------------------------------------------------------------------------

    async def _hf_listing(self, request: web.Request) -> web.StreamResponse:
        if (refused := self._refused(request)) is not None:
            return refused
        if request.match_info["revision"] not in ("main", "v2", self.commit):
            return web.json_response(
                {"error": "Revision Not Found"}, status=404, headers={"X-Error-Message": "Revision Not Found"}
            )
        assert request.query["blobs"] == "true"
        siblings = []
        for path, content in self.files.items():
            entry: dict[str, object] = {"rfilename": path, "size": self._size(path), "blobId": _git_sha1(content)}
            if path.endswith(LARGE):
                entry["lfs"] = {"sha256": _sha256(content), "size": self._size(path), "pointerSize": 134}
            siblings.append(entry)
        return web.json_response({"sha": self.commit, "siblings": siblings})

    async def _hf_file(self, request: web.Request) -> web.StreamResponse:
        file = request.match_info["file"]
        if (refused := self._refused(request, file)) is not None:
            return refused
        assert request.match_info["revision"] == self.commit, "the files are those of one commit"
        if file.endswith(LARGE):
            return web.Response(status=302, headers={"Location": f"{self.cdn_url}/cdn/{quote(file)}?signature=link"})
        return await self._send(request, file)

    async def _cdn(self, request: web.Request) -> web.StreamResponse:
        file = request.match_info["file"]
        self._note(request, file)
        assert request.query["signature"] == "link"
        return await self._send(request, file)

    # ModelScope -----------------------------------------------------------------------------------------------------

    async def _ms_listing(self, request: web.Request) -> web.StreamResponse:
        if (refused := self._refused(request)) is not None:
            return refused
        assert request.query["Recursive"] == "True"
        if request.query["Revision"] not in ("master", "v2"):
            return web.json_response({"Code": 10010205001, "Message": "revision not exist", "Success": False})
        entries: list[dict[str, object]] = [{"Path": "onnx", "Name": "onnx", "Type": "tree", "Size": 0, "Sha256": ""}]
        entries += [
            {
                "Path": path,
                "Name": path.rpartition("/")[2],
                "Type": "blob",
                "Size": self._size(path),
                "Sha256": _sha256(c),
            }
            for path, c in self.files.items()
        ]
        return web.json_response({"Code": 200, "Data": {"Files": entries}, "Message": "success", "Success": True})

    async def _ms_file(self, request: web.Request) -> web.StreamResponse:
        file = request.query["FilePath"]
        return self._refused(request, file) or await self._send(request, file)

    # S3 -------------------------------------------------------------------------------------------------------------

    async def _s3_list(self, request: web.Request) -> web.StreamResponse:
        if (refused := self._s3_refused(request)) is not None:
            return refused
        assert (request.query["list-type"], request.query["delimiter"]) == ("2", "/")
        prefix = request.query["prefix"]
        keys = sorted(f"{self.prefix}/{path}" for path in self.files)
        keys = [key for key in keys if key.startswith(prefix)]
        folders = {
            prefix + key.removeprefix(prefix).partition("/")[0] + "/" for key in keys if "/" in key[len(prefix) :]
        }
        keys = [key for key in keys if "/" not in key.removeprefix(prefix)]
        begin = int(request.query.get("continuation-token", "0"))
        page, more = keys[begin : begin + PAGE_KEYS], begin + PAGE_KEYS < len(keys)
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{self._size(key.removeprefix(self.prefix + '/'))}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
            for key in page
        )
        contents += "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)
        )
        token = f"<NextContinuationToken>{begin + PAGE_KEYS}</NextContinuationToken>" if more else ""
        return web.Response(
            content_type="application/xml",
            text=f'<?xml version="1.0"?><ListBucketResult xmlns="{_XMLNS}"><Name>{self.bucket}</Name>'
            f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount><MaxKeys>{PAGE_KEYS}</MaxKeys>"
            f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{token}{contents}</ListBucketResult>",
        )

    async def _s3_object(self, request: web.Request) -> web.StreamResponse:
        file = request.match_info["key"].removeprefix(f"{self.prefix}/")
        if (refused := self._s3_refused(request, file)) is not None:
            return refused
        if file not in self.files:
            return _s3_error(404, "NoSuchKey")
        tag = f'"{hashlib.md5(self.files[file]).hexdigest()}"'
        if request.headers.get("If-Match", tag) != tag:
            return _s3_error(412, "PreconditionFailed")
        if request.method == "HEAD":
            headers = {"ETag": tag, "Content-Length": str(self._size(file))}
            if self.checksums and request.headers.get("x-amz-checksum-mode") == "ENABLED":
                headers["x-amz-checksum-sha256"] = b64encode(hashlib.sha256(self.files[file]).digest()).decode()
                headers["x-amz-checksum-type"] = "FULL_OBJECT"
            return web.Response(headers=headers)
        return await self._send(request, file, headers={"ETag": tag})

    def _s3_refused(self, request: web.Request, file: str = "") -> web.StreamResponse | None:
        self._note(request, file)
        if self.refuse:
            status, headers = self.refuse.pop(0)
            return web.Response(status=status, headers=headers)
        if self.access_key is not None and not signature_is_right(request, *self.access_key):
            return _s3_error(403, "SignatureDoesNotMatch")
        token = request.headers.get("X-Amz-Security-Token") or request.query.get("X-Amz-Security-Token")
        if self.session_token is not None and token != self.session_token:
            return _s3_error(400 if request.method == "GET" else 403, "InvalidToken")
        authorization = request.headers.get("Authorization", "")
        if authorization and f"/{self.region}/s3/" not in authorization:
            return _s3_error(400, "AuthorizationHeaderMalformed", {"x-amz-bucket-region": self.region})
        return None

    async def _sts(self, request: web.Request) -> web.StreamResponse:
        self._note(request, "")
        if self.refuse:
            status, headers = self.refuse.pop(0)
            return web.Response(status=status, headers=headers)
        assert (request.query["Action"], self.access_key is None) == ("AssumeRoleWithWebIdentity", False)
        assert request.query["RoleArn"] == "arn:aws:iam::1:role/models"
        if request.query["WebIdentityToken"] != self.web_identity or self.access_key is None:
            return _s3_error(403, "AccessDenied")
        self.session_token = "lent"
        key_id, secret = self.access_key
        return web.Response(
            content_type="text/xml",
            text='<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
            f"<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{key_id}</AccessKeyId>"
            f"<SecretAccessKey>{secret}</SecretAccessKey><SessionToken>lent</SessionToken>"
            "<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleWithWebIdentityResult>"
            "</AssumeRoleWithWebIdentityResponse>",
        )

    async def _metadata(self, request: web.Request) -> web.StreamResponse:
        if self.instance_role is None or self.access_key is None:
            return web.Response(status=404)
        if request.method == "PUT":
            return web.Response(text="of the metadata")
        if request.headers.get("X-aws-ec2-metadata-token") != "of the metadata":
            return web.Response(status=401)
        if request.match_info["role"] != self.instance_role:
            return web.Response(text=self.instance_role)
        return self._lent(self.access_key)

    async def _pod_identity(self, request: web.Request) -> web.StreamResponse:
        if self.access_key is None or request.headers.get("Authorization") != self.web_identity:
            return web.Response(status=401)
        return self._lent(self.access_key)

    def _lent(self, access_key: tuple[str, str]) -> web.Response:
        self.session_token = "lent"
        key_id, secret = access_key
        answer = {"Code": "Success", "AccessKeyId": key_id, "SecretAccessKey": secret, "Token": "lent"}
        return web.json_response(answer | {"Expiration": "2099-01-01T00:00:00Z"})

    # All of them ----------------------------------------------------------------------------------------------------

    def _note(self, request: web.Request, file: str) -> None:
        self.seen.append(
            Seen(
                server=request.app[SERVER],
                path=request.path,
                file=file,
                range=request.headers.get("Range"),
                authorization=request.headers.get("Authorization"),
                cookie=request.headers.get("Cookie"),
            )
        )

    def _refused(self, request: web.Request, file: str = "") -> web.StreamResponse | None:
        self._note(request, file)
        if self.refuse:
            status, headers = self.refuse.pop(0)
            return web.Response(status=status, headers=headers)
        if self.token is not None:
            cookie = f"m_session_id={self.token}"
            if (
                request.headers.get("Authorization") != f"Bearer {self.token}"
                and request.headers.get("Cookie") != cookie
            ):
                return web.Response(status=401, headers={"X-Error-Message": "Invalid username or password."})
        if file and file not in self.files:
            return web.Response(status=404)
        return None

    def _size(self, path: str) -> int:
        return self.sizes.get(path, len(self.files[path]))

    async def _send(
        self, request: web.Request, file: str, *, headers: Mapping[str, str] | None = None
    ) -> web.StreamResponse:
        content, begin = self.files[file], 0
        if self.corrupt.get(file, 0) > 0:
            self.corrupt[file] -= 1
            content = bytes([content[0] ^ 1]) + content[1:]
        asked = request.headers.get("Range")
        self.asked[file].append(asked)
        answer = web.StreamResponse(headers=headers)
        if asked is not None and self.ranges:
            begin = int(asked.removeprefix("bytes=").removesuffix("-"))
            if begin >= len(content):
                return web.Response(status=416)
            answer.set_status(206)
            answer.headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        answer.content_length = len(content) - begin
        await answer.prepare(request)
        limit = self.cuts[file].pop(0) if self.cuts[file] else None
        silent = self.silent.get(file, 0) > 0
        if silent:
            self.silent[file] -= 1
        end = len(content)
        for at in range(begin, end, PIECE):
            stop = min(at + PIECE, end, end if limit is None else max(begin + limit, at))
            await answer.write(content[at:stop])
            self.sent[file] += stop - at
            if limit is not None and stop - begin >= limit:
                assert request.transport is not None
                request.transport.abort()
                return answer
            if silent:
                await asyncio.sleep(3600)
            if self.pause:
                await asyncio.sleep(self.pause)
            if self.gate is not None and stop >= end // 2 and end > PIECE:
                await self.gate.wait()
        return answer


@asynccontextmanager
async def serving(hub: ModelHub) -> AsyncIterator[ModelHub]:
    """The hub at `hub.url`, its CDN at another origin."""
    runners = []
    try:
        for server in ("hub", "cdn"):
            app = web.Application()
            hub.routes(app, server=server)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
            runners.append(runner)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            if server == "hub":
                hub.url = url
            else:
                hub.cdn_url = url
        yield hub
    finally:
        for runner in runners:
            await runner.cleanup()


def signature_is_right(request: web.Request, key_id: str, secret: str) -> bool:
    """Whether the request carries AWS' signature, version 4, in its header or in its query, made with this key.

    Written from the description of the signature, so that a client's idea of it is not compared with itself.
    """
    query = [tuple(pair.partition("=")[::2]) for pair in request.rel_url.raw_query_string.split("&") if pair]
    header = request.headers.get("Authorization")
    if header is not None:
        algorithm, _, rest = header.partition(" ")
        fields = dict(part.strip().split("=", 1) for part in rest.split(","))
        credential, signed, given = fields["Credential"], fields["SignedHeaders"], fields["Signature"]
        moment, payload = request.headers["X-Amz-Date"], request.headers["X-Amz-Content-SHA256"]
    else:
        values = {name: unquote(value) for name, value in query}
        if "X-Amz-Signature" not in values:
            return False
        algorithm, credential, signed = (values[f"X-Amz-{x}"] for x in ("Algorithm", "Credential", "SignedHeaders"))
        given, moment, payload = values["X-Amz-Signature"], values["X-Amz-Date"], "UNSIGNED-PAYLOAD"
        query = [pair for pair in query if pair[0] != "X-Amz-Signature"]
    asked_id, _, scope = credential.partition("/")
    if algorithm != "AWS4-HMAC-SHA256" or asked_id != key_id:
        return False
    canonical = "\n".join(
        [
            request.method,
            request.rel_url.raw_path,
            "&".join(f"{name}={value}" for name, value in sorted(query)),
            *(f"{name}:{' '.join(request.headers[name].split())}" for name in signed.split(";")),
            "",
            signed,
            payload,
        ]
    )
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    text = "\n".join(["AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    return hmac.compare_digest(hmac.new(key, text.encode(), hashlib.sha256).hexdigest(), given)


def _s3_error(status: int, code: str, headers: Mapping[str, str] | None = None) -> web.Response:
    text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code} it is</Message></Error>'
    return web.Response(status=status, text=text, content_type="application/xml", headers=headers)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()

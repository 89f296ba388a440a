"""Models in buckets: an S3 server that checks each signature by itself."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from reprise_engine.errors import ConfigError, DamagedModel, ModelFetchDenied, ModelFetchFailed, ModelNotFound
from reprise_engine.fetch.bucket import Bucket, _digest
from reprise_engine.fetch.bucket_client import ADDRESSING_VARIABLE, Server, read_server
from reprise_engine.fetch.files import Digest, Listing, RemoteFile
from reprise_engine.fetch.run import FetchOptions, fetch
from reprise_engine.fetch.uri import BucketModel, parse_uri
from tests.engine.test_fetch import FILES, QUICK, WANTED, is_complete, present
from tests.support.model_hub import ModelHub, serving

KEY, SECRET = "AKIAREPRISE", "a-secret-key-nobody-may-see"
WEB_TOKEN = "a-token-nobody-may-see"


KEYS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
NO_KEYS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
NOWHERE = {"AWS_SHARED_CREDENTIALS_FILE": "/nowhere", "AWS_EC2_METADATA_DISABLED": "true"}


@pytest.fixture
async def hub() -> AsyncIterator[ModelHub]:
    files = dict(FILES) | {"merges.txt": b"a b", "vocab.json": b"{}"}
    async with serving(ModelHub(files=files, access_key=(KEY, SECRET))) as hub:
        yield hub


ALL = WANTED | {"merges.txt": b"a b", "vocab.json": b"{}"}


async def bring(hub: ModelHub, folder: Path, uri: str = "s3://models/qwen", **environment: str) -> None:
    options = FetchOptions(uri=parse_uri(uri), folder=folder, parallel=2, retries=QUICK, progress_seconds=0.05)
    await fetch(options, {**hub.hub_environment, **NOWHERE, **KEYS, **environment})


async def test_a_folder_of_a_bucket_is_brought(hub: ModelHub, tmp_path: Path) -> None:
    await bring(hub, tmp_path)
    assert present(tmp_path) == ALL
    assert is_complete(tmp_path)
    assert len([seen for seen in hub.seen if seen.path == "/models"]) == 4, "the listing came in pages"


async def test_one_gguf_file(hub: ModelHub, tmp_path: Path) -> None:
    hub.files["q4 a.gguf"], hub.files["q8.gguf"] = b"four", b"eight"
    await bring(hub, tmp_path, "s3://models/qwen/q4 a.gguf")
    assert present(tmp_path) == {"q4 a.gguf": b"four"}


async def test_it_is_taken_up_where_it_ended(hub: ModelHub, tmp_path: Path) -> None:
    hub.cuts["model.safetensors"] = [300_000, 400_000]
    await bring(hub, tmp_path)
    assert present(tmp_path) == ALL
    assert hub.asked["model.safetensors"][1] != "bytes=0-"
    assert hub.sent["model.safetensors"] < 2 * len(FILES["model.safetensors"])


async def test_what_came_is_compared_with_the_etag(hub: ModelHub, tmp_path: Path) -> None:
    hub.corrupt["model.safetensors"] = 1
    await bring(hub, tmp_path)
    assert present(tmp_path) == ALL
    hub.corrupt["model.safetensors"] = 9
    with pytest.raises(DamagedModel, match="twice in a row"):
        await bring(hub, tmp_path / "again")


async def test_an_object_replaced_meanwhile_is_never_mixed(hub: ModelHub, tmp_path: Path) -> None:
    source = Bucket(BucketModel(bucket="models", path="qwen"), {**hub.hub_environment, **KEYS})
    listing = await source.list()
    (file,) = [file for file in listing.files if file.path == "model.safetensors"]
    request = await source.request(file, listing)
    assert request.headers == {"If-Match": f'"{file.identity}"'}
    hub.cuts["model.safetensors"] = [300_000]
    original, replaced = hub.files["model.safetensors"], hub.files["model.safetensors"][::-1]

    class Replacing(dict[str, bytes]):
        """The second time the object is asked for it is another one."""

        def __getitem__(self, name: str) -> bytes:
            return replaced if name == "model.safetensors" and hub.asked[name] else super().__getitem__(name)

    hub.files = Replacing(hub.files)
    with pytest.raises(ModelFetchFailed, match=r"model\.safetensors: was replaced while it was fetched"):
        await bring(hub, tmp_path)
    assert original != replaced
    await bring(hub, tmp_path)
    assert present(tmp_path)["model.safetensors"] == replaced


@pytest.mark.parametrize(("key", "secret"), [(KEY, "wrong"), ("WRONG", SECRET)])
async def test_wrong_credentials(hub: ModelHub, tmp_path: Path, key: str, secret: str) -> None:
    with pytest.raises(ModelFetchDenied, match=r"SignatureDoesNotMatch.*AWS_ACCESS_KEY_ID") as caught:
        await bring(hub, tmp_path, AWS_ACCESS_KEY_ID=key, AWS_SECRET_ACCESS_KEY=secret)
    assert secret not in str(caught.value)


async def test_without_credentials_a_public_bucket_is_read(hub: ModelHub, tmp_path: Path) -> None:
    hub.access_key = None
    await bring(hub, tmp_path, **NO_KEYS)
    assert present(tmp_path) == ALL
    assert {seen.authorization for seen in hub.seen} == {None}


@pytest.mark.parametrize("missing", list(KEYS))
async def test_half_of_the_credentials(hub: ModelHub, tmp_path: Path, missing: str) -> None:
    with pytest.raises(ModelFetchDenied, match=rf"\${missing} is not.*spec\.model\.secretRef") as caught:
        await bring(hub, tmp_path, **{missing: ""})
    assert SECRET not in str(caught.value)
    assert hub.seen == []


async def test_the_token_of_a_session_is_sent_and_signed(hub: ModelHub, tmp_path: Path) -> None:
    hub.session_token = "of a session"
    await bring(hub, tmp_path / "a", AWS_SESSION_TOKEN="of a session")
    assert present(tmp_path / "a") == ALL
    with pytest.raises(ModelFetchDenied, match="InvalidToken"):
        await bring(hub, tmp_path / "b", AWS_SESSION_TOKEN="another")


async def test_keys_of_a_file(hub: ModelHub, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text(f"[models]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    given = {**NO_KEYS, "AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_PROFILE": "models"}
    await bring(hub, tmp_path / "m", **given)
    assert present(tmp_path / "m") == ALL
    with pytest.raises(ModelFetchDenied, match="profile 'others'"):
        await bring(hub, tmp_path / "n", **{**given, "AWS_PROFILE": "others"})
    with pytest.raises(ModelFetchDenied, match="SignatureDoesNotMatch"):  # no default profile: not signed
        await bring(hub, tmp_path / "o", **{**given, "AWS_PROFILE": ""})


@pytest.fixture
def web_identity(hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """As the webhook for service accounts sets it; the SDK reads these from the process."""
    token = tmp_path / "token"
    token.write_text(WEB_TOKEN)
    names = {"AWS_WEB_IDENTITY_TOKEN_FILE": str(token), "AWS_ROLE_ARN": "arn:aws:iam::1:role/models"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    hub.web_identity = WEB_TOKEN
    return {**NO_KEYS, **names}


async def test_the_pods_web_identity(hub: ModelHub, tmp_path: Path, web_identity: dict[str, str]) -> None:
    await bring(hub, tmp_path / "m", **web_identity)
    assert present(tmp_path / "m") == ALL
    assert [seen.path for seen in hub.seen].count("/") == 1, "the credentials are kept while they are valid"


async def test_a_web_identity_that_is_refused(hub: ModelHub, tmp_path: Path, web_identity: dict[str, str]) -> None:
    hub.web_identity = "of another service account"
    with pytest.raises(ModelFetchDenied, match=r"web identity gave no credentials \(HTTP 403\)") as caught:
        await bring(hub, tmp_path / "m", **web_identity)
    assert WEB_TOKEN not in str(caught.value)


async def test_a_token_service_that_fails_is_asked_again(
    hub: ModelHub, tmp_path: Path, web_identity: dict[str, str]
) -> None:
    hub.refuse = [(503, {}), (500, {})]
    await bring(hub, tmp_path / "m", **web_identity)
    assert present(tmp_path / "m") == ALL


async def test_the_endpoint_of_the_pods_identity(
    hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text(WEB_TOKEN)
    names = {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{hub.url}/v1/credentials",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(token),
    }
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelFetchDenied, match=r"pod's identity gave no credentials \(HTTP 401\)"):
        await bring(hub, tmp_path / "m", **NO_KEYS, **names)
    hub.web_identity = WEB_TOKEN
    await bring(hub, tmp_path / "m", **NO_KEYS, **names)
    assert present(tmp_path / "m") == ALL


async def test_the_role_of_the_instance(hub: ModelHub, tmp_path: Path) -> None:
    asked = {**NO_KEYS, "AWS_EC2_METADATA_DISABLED": "", "AWS_EC2_METADATA_SERVICE_ENDPOINT": hub.url}
    with pytest.raises(ModelFetchDenied, match="SignatureDoesNotMatch"):  # there is none: not signed
        await bring(hub, tmp_path, **asked)
    hub.instance_role = "models"
    await bring(hub, tmp_path, **asked)
    assert present(tmp_path) == ALL


@pytest.mark.parametrize("uri", ["s3://models/nothing", "s3://models/qwen/nothing.gguf"])
async def test_nothing_there(hub: ModelHub, tmp_path: Path, uri: str) -> None:
    with pytest.raises(ModelNotFound, match=r"spec\.model\.uri"):
        await bring(hub, tmp_path, uri)


async def test_a_server_that_is_not_there(hub: ModelHub, tmp_path: Path) -> None:
    with pytest.raises(ModelFetchFailed, match="NewConnectionError; given up after 3 attempts"):
        await bring(hub, tmp_path, AWS_ENDPOINT_URL="http://127.0.0.1:1")


async def test_links_and_keys_are_never_in_the_log(
    hub: ModelHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="reprise_engine")
    hub.cuts["model.safetensors"] = [10]
    await bring(hub, tmp_path)
    assert "try 2 of 3" in caplog.text
    for word in (SECRET, KEY, "Signature"):
        assert word not in caplog.text


async def test_a_bucket_elsewhere_is_asked_in_its_own_region(hub: ModelHub, tmp_path: Path) -> None:
    hub.region = "eu-central-1"
    await bring(hub, tmp_path)
    assert present(tmp_path) == ALL
    assert {seen.authorization.split("/")[2] for seen in hub.seen[1:] if seen.authorization} == {"eu-central-1"}


async def test_a_proxy_is_used(hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", hub.url.replace("//", "//user:pass%21@"))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    await bring(hub, tmp_path / "a", AWS_ENDPOINT_URL="http://bucket.example")
    assert present(tmp_path / "a") == ALL
    monkeypatch.setenv("no_proxy", ".example")
    with pytest.raises(ModelFetchFailed, match="s3://models/qwen: Name"):
        await bring(hub, tmp_path / "b", AWS_ENDPOINT_URL="http://bucket.example")


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, ModelFetchDenied), (403, ModelFetchDenied), (404, ModelNotFound), (429, None), (500, None), (503, None)],
)
@pytest.mark.parametrize("uri", ["s3://models/qwen", "s3://models/qwen/q4.gguf"])
async def test_answers_without_words(
    hub: ModelHub, tmp_path: Path, uri: str, status: int, kind: type[Exception] | None
) -> None:
    hub.files["q4.gguf"] = b"four"
    hub.refuse = [(status, {})]
    if kind is None:
        await bring(hub, tmp_path, uri)
        assert present(tmp_path)
    else:
        with pytest.raises(kind, match=r"spec\.model"):
            await bring(hub, tmp_path, uri)


async def test_an_answer_that_is_no_xml(hub: ModelHub, tmp_path: Path) -> None:
    hub.refuse = [(200, {})] * 3
    with pytest.raises(ModelFetchFailed, match=r"the answer is not S3's; is \$AWS_ENDPOINT_URL the API's address"):
        await bring(hub, tmp_path)


async def test_an_object_without_size_or_etag(hub: ModelHub, tmp_path: Path) -> None:
    hub.refuse = [(200, {})] * 3
    with pytest.raises(ModelFetchFailed, match=r"no size or no ETag of q4\.gguf"):
        await bring(hub, tmp_path, "s3://models/qwen/q4.gguf")
    assert present(tmp_path) == {}


async def test_the_checksum_that_the_store_keeps_is_preferred(hub: ModelHub, tmp_path: Path) -> None:
    hub.checksums = True
    source = Bucket(BucketModel(bucket="models", path="qwen"), {**hub.hub_environment, **KEYS})
    digests = {file.path: file.digest for file in (await source.list()).files}
    expected = hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    assert digests["model.safetensors"] == Digest(algorithm="sha256", value=expected)
    await bring(hub, tmp_path)
    assert present(tmp_path) == ALL


async def test_folders_below_are_left_out(hub: ModelHub, tmp_path: Path) -> None:
    hub.files["onnx/model.json"] = b"{}"
    hub.files["onnx/"] = b""
    source = Bucket(BucketModel(bucket="models", path="qwen"), {**hub.hub_environment, **KEYS})
    files = {file.path for file in (await source.list()).files}
    assert files == {name for name in hub.files if "/" not in name}


@pytest.mark.parametrize(
    ("environment", "host"),
    [
        ({}, "https://models.s3.us-east-1.amazonaws.com/"),
        ({"AWS_REGION": "eu-west-1"}, "https://models.s3.eu-west-1.amazonaws.com/"),
        ({"AWS_DEFAULT_REGION": "eu-west-1"}, "https://models.s3.eu-west-1.amazonaws.com/"),
        ({"AWS_REGION": "cn-north-1"}, "https://models.s3.cn-north-1.amazonaws.com.cn/"),
        ({ADDRESSING_VARIABLE: "path"}, "https://s3.us-east-1.amazonaws.com/models/"),
        ({"AWS_ENDPOINT_URL": "https://minio.example"}, "https://minio.example/models/"),
        ({"AWS_ENDPOINT_URL": "http://minio.storage:9000/"}, "http://minio.storage:9000/models/"),
        (
            {"AWS_ENDPOINT_URL": "https://other", "AWS_ENDPOINT_URL_S3": "https://minio.example"},
            "https://minio.example/models/",
        ),
        (
            {"AWS_ENDPOINT_URL": "https://obs.example", ADDRESSING_VARIABLE: "virtual"},
            "https://models.obs.example/",
        ),
    ],
)
async def test_addressing(environment: dict[str, str], host: str) -> None:
    source = Bucket(BucketModel(bucket="models", path="a b"), {**NOWHERE, **environment})
    file = RemoteFile(path="k.json", size=1, identity="tag", digest=None)
    request = await source.request(file, Listing(files=(file,)))
    assert request.url == f"{host}a%20b/k.json"


def test_the_region_of_an_address_at_aws() -> None:
    found = read_server({"AWS_ENDPOINT_URL": "https://s3.dualstack.ap-southeast-1.amazonaws.com"})
    assert found == Server(
        secure=True, host="s3.dualstack.ap-southeast-1.amazonaws.com", region="ap-southeast-1", addressing="auto"
    )


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({ADDRESSING_VARIABLE: "dns"}, rf"\${ADDRESSING_VARIABLE} is 'dns'"),
        ({"AWS_ENDPOINT_URL": "minio.example:9000"}, r"\$AWS_ENDPOINT_URL is 'minio.example:9000'"),
        ({"AWS_ENDPOINT_URL_S3": "https://x/s3"}, r"\$AWS_ENDPOINT_URL_S3 is 'https://x/s3'.*without a path"),
        ({"AWS_ENDPOINT_URL": "https://x:port"}, r"\$AWS_ENDPOINT_URL is"),
        ({"AWS_ENDPOINT_URL": "https://a:hidden@x"}, r"\$AWS_ENDPOINT_URL is not an address"),
        ({"AWS_REGION": "eu west"}, r"region 'eu west'.*\$AWS_REGION"),
    ],
)
def test_an_address_that_cannot_be(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Bucket(BucketModel(bucket="models"), environment)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("model", [BucketModel(bucket="a"), BucketModel(bucket="models", path="a/./b")])
def test_a_name_that_no_bucket_has(model: BucketModel) -> None:
    with pytest.raises(ModelNotFound, match=r"spec\.model\.uri"):
        Bucket(model, {})


async def test_certificates_that_cannot_be_read(hub: ModelHub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\$AWS_CA_BUNDLE is '/nowhere'"):
        await bring(hub, tmp_path, AWS_ENDPOINT_URL="https://127.0.0.1:1", AWS_CA_BUNDLE="/nowhere")


MD5 = "5d41402abc4b2a76b9719d911017c592"
SHA256 = "x-amz-checksum-sha256"


@pytest.mark.parametrize(
    ("headers", "tag", "digest"),
    [
        ({}, MD5, Digest(algorithm="md5", value=MD5)),
        ({}, f"{MD5}-12", None),
        ({"x-amz-server-side-encryption": "AES256"}, MD5, Digest(algorithm="md5", value=MD5)),
        ({"x-amz-server-side-encryption": "aws:kms"}, MD5, None),
        ({"x-amz-server-side-encryption": "aws:kms:dsse"}, MD5, None),
        ({"x-amz-server-side-encryption-customer-algorithm": "AES256"}, MD5, None),
        ({SHA256: "AAEC"}, f"{MD5}-2", Digest(algorithm="sha256", value="000102")),
        ({SHA256: "AAEC", "x-amz-checksum-type": "COMPOSITE"}, f"{MD5}-2", None),
        ({SHA256: "AAEC-2"}, f"{MD5}-2", None),
    ],
)
def test_which_digest_an_object_has(headers: dict[str, str], tag: str, digest: Digest | None) -> None:
    assert _digest(headers, tag) == digest

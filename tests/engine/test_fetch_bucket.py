"""Models in buckets: an S3 server that checks each signature by itself."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from reprise_engine.errors import ConfigError, DamagedModel, ModelFetchDenied, ModelFetchFailed, ModelNotFound
from reprise_engine.fetch.bucket import ADDRESSING_VARIABLE, Bucket, _digest
from reprise_engine.fetch.files import Digest
from reprise_engine.fetch.run import FetchOptions, fetch
from reprise_engine.fetch.uri import BucketModel, parse_uri
from tests.engine.test_fetch import FILES, QUICK, WANTED, is_complete, present
from tests.support.model_hub import ModelHub, serving

pytest.importorskip("botocore", reason="botocore is not installed: pip install -c constraints.txt botocore")

KEY, SECRET = "AKIAREPRISE", "a-secret-key-nobody-may-see"


@pytest.fixture
async def hub(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModelHub]:
    """botocore reads credentials from the process's environment."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    files = dict(FILES) | {"merges.txt": b"a b", "vocab.json": b"{}"}
    async with serving(ModelHub(files=files, access_key=(KEY, SECRET))) as hub:
        yield hub


ALL = WANTED | {"merges.txt": b"a b", "vocab.json": b"{}"}


async def bring(hub: ModelHub, folder: Path, uri: str = "s3://models/qwen", **environment: str) -> None:
    options = FetchOptions(uri=parse_uri(uri), folder=folder, parallel=2, retries=QUICK, progress_seconds=0.05)
    await fetch(options, {**hub.hub_environment, **environment})


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
    source = Bucket(BucketModel(bucket="models", path="qwen"), hub.hub_environment)
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
async def test_wrong_credentials(
    hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, secret: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with pytest.raises(ModelFetchDenied, match=r"SignatureDoesNotMatch.*AWS_ACCESS_KEY_ID") as caught:
        await bring(hub, tmp_path)
    assert secret not in str(caught.value)


async def test_without_credentials_a_public_bucket_is_read(
    hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    hub.access_key = None
    await bring(hub, tmp_path)
    assert present(tmp_path) == ALL
    assert {seen.authorization for seen in hub.seen} == {None}


async def test_half_of_the_credentials(hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ModelFetchDenied, match=r"spec\.model\.secretRef"):
        await bring(hub, tmp_path)


@pytest.mark.parametrize("uri", ["s3://models/nothing", "s3://models/qwen/nothing.gguf"])
async def test_nothing_there(hub: ModelHub, tmp_path: Path, uri: str) -> None:
    with pytest.raises(ModelNotFound, match=r"spec\.model\.uri"):
        await bring(hub, tmp_path, uri)


async def test_a_server_that_is_not_there(hub: ModelHub, tmp_path: Path) -> None:
    with pytest.raises(ModelFetchFailed, match="EndpointConnectionError; given up after 3 attempts"):
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


def test_addressing() -> None:
    hosted = Bucket(
        BucketModel(bucket="models"), {"AWS_ENDPOINT_URL": "https://obs.example", ADDRESSING_VARIABLE: "virtual"}
    )
    assert hosted._client.generate_presigned_url("get_object", Params={"Bucket": "models", "Key": "k"}).startswith(
        "https://models.obs.example/k"
    )
    plain = Bucket(BucketModel(bucket="models"), {"AWS_ENDPOINT_URL": "https://minio.example"})
    assert plain._client.generate_presigned_url("get_object", Params={"Bucket": "models", "Key": "k"}).startswith(
        "https://minio.example/models/k"
    )
    with pytest.raises(ConfigError, match=f"{ADDRESSING_VARIABLE} is 'dns'"):
        Bucket(BucketModel(bucket="models"), {ADDRESSING_VARIABLE: "dns"})


MD5 = "5d41402abc4b2a76b9719d911017c592"


@pytest.mark.parametrize(
    ("answer", "tag", "digest"),
    [
        ({}, MD5, Digest(algorithm="md5", value=MD5)),
        ({}, f"{MD5}-12", None),
        ({"ServerSideEncryption": "AES256"}, MD5, Digest(algorithm="md5", value=MD5)),
        ({"ServerSideEncryption": "aws:kms"}, MD5, None),
        ({"SSECustomerAlgorithm": "AES256"}, MD5, None),
        ({"ChecksumSHA256": "AAEC"}, f"{MD5}-2", Digest(algorithm="sha256", value="000102")),
        ({"ChecksumSHA256": "AAEC", "ChecksumType": "COMPOSITE"}, f"{MD5}-2", None),
        ({"ChecksumSHA256": "AAEC-2"}, f"{MD5}-2", None),
    ],
)
def test_which_digest_an_object_has(answer: dict[str, str], tag: str, digest: Digest | None) -> None:
    assert _digest(answer, tag) == digest

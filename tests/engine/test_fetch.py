"""`reprise fetch`, called in this process, from hubs over real HTTP that break off, lie, refuse and fall silent."""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from reprise_engine.errors import (
    ConfigError,
    DamagedModel,
    FetchError,
    ModelFetchDenied,
    ModelFetchFailed,
    ModelNotFound,
    ModelVolumeFull,
    ModelVolumeUnusable,
    UnsupportedModel,
)
from reprise_engine.fetch.files import RemoteFile, wanted
from reprise_engine.fetch.progress import Progress, amount, duration
from reprise_engine.fetch.run import FetchOptions, fetch
from reprise_engine.fetch.sources import endpoint
from reprise_engine.fetch.store import PRIVATE, volume_errors
from reprise_engine.fetch.uri import BucketModel, HubModel, parse_uri
from reprise_engine.fetch.web import Retries
from tests.support.model_hub import COMMIT, ModelHub, serving

TOKEN = "hf_a-secret-nobody-may-see"
WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
FILES = {
    "config.json": b'{"model_type": "qwen3"}',
    "tokenizer.json": b"{}" * 1000,
    "model.safetensors": WEIGHTS,
    "modeling_qwen.py": b"import os",
    "README.md": b"# Qwen",
    "onnx/model.safetensors": b"no engine reads it",
    "pytorch_model.bin": b"the same once more",
}
WANTED = {name: FILES[name] for name in ("config.json", "tokenizer.json", "model.safetensors")}
QUICK = Retries(attempts=3, base=0.01, cap=0.05)


@pytest.fixture
async def hub() -> AsyncIterator[ModelHub]:
    async with serving(ModelHub(files=dict(FILES))) as hub:
        yield hub


async def bring(hub: ModelHub, folder: Path, uri: str = "hf://Qwen/Qwen3", **environment: str) -> None:
    options = FetchOptions(
        uri=parse_uri(uri), folder=folder, parallel=2, retries=QUICK, progress_seconds=0.02, silence_seconds=0.5
    )
    await fetch(options, {**hub.hub_environment, **environment})


def present(folder: Path) -> dict[str, bytes]:
    """What an engine would find."""
    found = (path for path in folder.rglob("*") if path.is_file() and PRIVATE not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def is_complete(folder: Path) -> bool:
    return (folder / PRIVATE / "complete.json").exists()


HUBS = ["hf://Qwen/Qwen3", "modelscope://Qwen/Qwen3"]


@pytest.mark.parametrize("uri", [*HUBS, "hf://Qwen/Qwen3@v2", "modelscope://Qwen/Qwen3@v2"])
async def test_what_an_engine_reads_is_brought_and_no_code(hub: ModelHub, tmp_path: Path, uri: str) -> None:
    await bring(hub, tmp_path / "m", uri)
    assert present(tmp_path / "m") == WANTED
    assert is_complete(tmp_path / "m")
    assert not (tmp_path / "m" / PRIVATE / "parts").exists()


async def test_a_complete_model_asks_nobody(hub: ModelHub, tmp_path: Path) -> None:
    await bring(hub, tmp_path)
    hub.seen.clear()
    await bring(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:1")
    assert hub.seen == []


@pytest.mark.parametrize("uri", HUBS)
async def test_a_connection_that_breaks_off_is_taken_up_where_it_ended(hub: ModelHub, tmp_path: Path, uri: str) -> None:
    hub.cuts["model.safetensors"] = [300_000, 0, 400_000]
    await bring(hub, tmp_path, uri)
    assert present(tmp_path) == WANTED
    begins = [int(str(asked).removeprefix("bytes=").removesuffix("-")) for asked in hub.asked["model.safetensors"]]
    assert len(begins) == 4
    assert begins[0] == 0
    # What was sent right before the end may not have arrived, but nothing is asked for twice that has.
    assert begins == sorted(begins)
    assert begins[3] > begins[0]
    assert hub.sent["model.safetensors"] < 2 * len(WEIGHTS)


async def test_a_server_without_ranges_sends_all_of_it_again(hub: ModelHub, tmp_path: Path) -> None:
    hub.ranges, hub.cuts["model.safetensors"] = False, [300_000]
    await bring(hub, tmp_path)
    assert present(tmp_path) == WANTED


async def test_a_silent_connection_is_given_up(hub: ModelHub, tmp_path: Path) -> None:
    hub.silent["model.safetensors"] = 1
    await bring(hub, tmp_path)
    assert present(tmp_path) == WANTED
    assert len(hub.asked["model.safetensors"]) == 2


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("uri", HUBS)
async def test_a_wrong_digest_is_fetched_once_more(hub: ModelHub, tmp_path: Path, uri: str, file: str) -> None:
    hub.corrupt[file] = 1
    await bring(hub, tmp_path, uri)
    assert present(tmp_path) == WANTED
    assert hub.asked[file] == ["bytes=0-", "bytes=0-"]
    assert hub.sent[file] == 2 * len(FILES[file])


async def test_a_digest_that_stays_wrong_is_an_error_and_the_file_never_in_place(hub: ModelHub, tmp_path: Path) -> None:
    hub.corrupt["model.safetensors"] = 99
    with pytest.raises(DamagedModel, match=r"model\.safetensors: .* twice in a row"):
        await bring(hub, tmp_path)
    assert hub.sent["model.safetensors"] == 2 * len(WEIGHTS)
    assert "model.safetensors" not in present(tmp_path)
    assert not is_complete(tmp_path)
    hub.corrupt.clear()
    await bring(hub, tmp_path)
    assert present(tmp_path) == WANTED
    assert hub.sent["config.json"] == len(FILES["config.json"]), "what was sound is not fetched again"


async def test_a_damaged_volume_is_mended(hub: ModelHub, tmp_path: Path) -> None:
    await bring(hub, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS[:1000])
    (tmp_path / "config.json").unlink()
    hub.asked.clear()
    await bring(hub, tmp_path)
    assert present(tmp_path) == WANTED
    assert sorted(hub.asked) == ["config.json", "model.safetensors"]


async def test_files_whose_record_was_lost_are_read_not_fetched(hub: ModelHub, tmp_path: Path) -> None:
    for name, content in WANTED.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_bytes(b"x" * len(FILES["config.json"]))
    await bring(hub, tmp_path)
    assert present(tmp_path) == WANTED
    assert sorted(hub.asked) == ["config.json"]


async def test_a_branch_that_moved_during_the_fetch_is_not_mixed(hub: ModelHub, tmp_path: Path) -> None:
    hub.cuts["model.safetensors"] = [300_000, 0, 0, 0, 0]
    with pytest.raises(ModelFetchFailed):
        await bring(hub, tmp_path)
    hub.cuts.clear()
    new = WEIGHTS[::-1]
    hub.files |= {"model.safetensors": new, "merges.txt": b"a b"}
    del hub.files["tokenizer.json"]
    hub.commit = "beef" * 10
    await bring(hub, tmp_path)
    assert present(tmp_path) == {"config.json": FILES["config.json"], "model.safetensors": new, "merges.txt": b"a b"}


async def test_a_volume_of_another_model_counts_for_nothing(hub: ModelHub, tmp_path: Path) -> None:
    await bring(hub, tmp_path)
    hub.files["model.safetensors"] = b"another"
    await bring(hub, tmp_path, "hf://Qwen/Qwen3@v2")
    assert present(tmp_path)["model.safetensors"] == b"another"


# Credentials --------------------------------------------------------------------------------------------------------


async def test_the_token_goes_to_the_hub_and_never_to_its_cdn(hub: ModelHub, tmp_path: Path) -> None:
    hub.token = TOKEN
    await bring(hub, tmp_path, HF_TOKEN=TOKEN)
    assert {seen.authorization for seen in hub.seen if seen.server == "hub"} == {f"Bearer {TOKEN}"}
    assert {seen.authorization for seen in hub.seen if seen.server == "cdn"} == {None}
    assert [seen.file for seen in hub.seen if seen.server == "cdn"] == ["model.safetensors"]


async def test_modelscope_gets_its_token_as_a_session(hub: ModelHub, tmp_path: Path) -> None:
    hub.token = TOKEN
    await bring(hub, tmp_path, "modelscope://Qwen/Qwen3", MODELSCOPE_API_TOKEN=f"{TOKEN}\n")
    assert {seen.cookie for seen in hub.seen} == {f"m_session_id={TOKEN}"}


@pytest.mark.parametrize("variable", ["HF_TOKEN", "MODELSCOPE_API_TOKEN"])
async def test_secrets_are_never_in_the_log(
    hub: ModelHub, tmp_path: Path, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    hub.token = "another"
    caplog.set_level(logging.DEBUG, logger="reprise_engine")
    for uri in HUBS:
        with pytest.raises(ModelFetchDenied, match=r"spec\.model\.secretRef") as caught:
            await bring(hub, tmp_path, uri, **{variable: TOKEN})
        assert TOKEN not in str(caught.value)
    hub.token, hub.cuts["model.safetensors"] = TOKEN, [10]
    await bring(hub, tmp_path / "m", HF_TOKEN=TOKEN)
    assert "try 2 of 3" in caplog.text
    assert TOKEN not in caplog.text
    assert "signature" not in caplog.text


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refuse", "kind", "words"),
    [
        ([(401, {})], ModelFetchDenied, "HTTP 401 .*secretRef"),
        ([(403, {"X-Error-Message": "Access to model is gated"})], ModelFetchDenied, "Access to model is gated"),
        ([(404, {})], ModelNotFound, "HTTP 404 .*spec.model.uri"),
        ([(500, {})] * 3, ModelFetchFailed, "HTTP 500 .*given up after 3 attempts"),
        ([(429, {"Retry-After": "0"})] * 3, ModelFetchFailed, "HTTP 429"),
        ([(418, {})], ModelNotFound, "HTTP 418"),
    ],
)
@pytest.mark.parametrize("uri", HUBS)
async def test_a_refusal_says_what_to_do(
    hub: ModelHub,
    tmp_path: Path,
    uri: str,
    refuse: list[tuple[int, dict[str, str]]],
    kind: type[Exception],
    words: str,
) -> None:
    hub.refuse = list(refuse)
    with pytest.raises(kind, match=words):
        await bring(hub, tmp_path, uri)
    assert not is_complete(tmp_path)


async def test_two_failures_are_no_matter(hub: ModelHub, tmp_path: Path) -> None:
    hub.refuse = [(503, {}), (429, {"Retry-After": "0.05"})]
    await bring(hub, tmp_path)
    assert present(tmp_path) == WANTED


@pytest.mark.parametrize("uri", ["hf://Qwen/Qwen3@v9", "modelscope://Qwen/Qwen3@v9"])
async def test_a_revision_that_does_not_exist(hub: ModelHub, tmp_path: Path, uri: str) -> None:
    with pytest.raises(ModelNotFound, match=r"(?i)revision not.*spec\.model\.uri"):
        await bring(hub, tmp_path, uri)


async def test_a_hub_that_is_not_there(hub: ModelHub, tmp_path: Path) -> None:
    with pytest.raises(ModelFetchFailed, match=r"at 127\.0\.0\.1; given up after 3 attempts.*network policy"):
        await bring(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:1")


async def test_a_page_that_is_no_api(hub: ModelHub, tmp_path: Path) -> None:
    with pytest.raises(ModelFetchFailed, match="is no JSON"):
        await bring(hub, tmp_path, HF_ENDPOINT=f"{hub.url}/Qwen/Qwen3/resolve/{COMMIT}/README.md?")


@pytest.mark.parametrize("value", ["ftp://hub", "file:///x"])
def test_an_endpoint_must_be_http(value: str) -> None:
    with pytest.raises(ConfigError, match=r"\$HF_ENDPOINT is"):
        endpoint({"HF_ENDPOINT": value}, "HF_ENDPOINT", "https://huggingface.co")
    assert endpoint({"HF_ENDPOINT": "hf-mirror.example/"}, "HF_ENDPOINT", "x") == "https://hf-mirror.example"


async def test_no_room_is_said_before_a_byte_comes(hub: ModelHub, tmp_path: Path) -> None:
    hub.sizes["model.safetensors"] = 1 << 60
    with pytest.raises(ModelVolumeFull, match=r"1073741824\.0 GiB are still to come.*spec\.model\.cache"):
        await bring(hub, tmp_path)
    assert not hub.asked


@pytest.mark.parametrize("size", [len(WEIGHTS) - 1, len(WEIGHTS) + 1])
async def test_a_listing_that_does_not_fit_the_file(hub: ModelHub, tmp_path: Path, size: int) -> None:
    hub.sizes["model.safetensors"] = size
    with pytest.raises(ModelFetchFailed, match=r"given up"):
        await bring(hub, tmp_path)
    assert "model.safetensors" not in present(tmp_path)


async def test_a_folder_that_cannot_be_made(hub: ModelHub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelVolumeUnusable, match=r"Not a directory.*must let user"):
        await bring(hub, tmp_path / "file" / "m")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, ModelVolumeFull),
        (errno.EDQUOT, ModelVolumeFull),
        (errno.EROFS, ModelVolumeUnusable),
        (errno.EIO, ModelVolumeUnusable),
    ],
)
def test_errors_of_the_volume(number: int, kind: type[FetchError]) -> None:
    with pytest.raises(kind, match="/v: "), volume_errors(Path("/v")):
        raise OSError(number, "as the kernel says")


async def test_progress_is_a_line_now_and_then(hub: ModelHub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="reprise_engine.fetch")
    hub.pause = 0.02
    await bring(hub, tmp_path)
    lines = [record.message for record in caplog.records if "%" in record.message]
    assert len(lines) >= 3
    assert all(" MiB" in line and "/s" in line for line in lines)
    assert "\r" not in caplog.text


# Pure ---------------------------------------------------------------------------------------------------------------


def remote(*names: str) -> list[RemoteFile]:
    return [RemoteFile(path=name, size=1, identity=name, digest=None) for name in names]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "vocab.json", "merges.txt"], {0, 3, 4}),
        (["model.safetensors", "pytorch_model.bin", "x.gguf", "config.json"], {0, 3}),
        (["model-00001-of-00002.safetensors", "consolidated.safetensors", "params.json"], {0, 2}),
        (["consolidated.safetensors", "params.json"], {0, 1}),
        (["training_args.bin", "optimizer.bin", "pytorch_model-00001-of-00002.bin"], {2}),
        (["q4.gguf", "README.md", "config.json"], {0, 2}),
        (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], {0, 1}),
        (["model.safetensors", "tokenizer.model", "qwen.tiktoken", "chat_template.jinja"], {0, 1, 2, 3}),
        (["model.safetensors", "additional_chat_templates/tools.jinja", "additional_chat_templates/a/b.jinja"], {0, 1}),
        (["model.safetensors", "configuration_qwen.py", "../config.json", ".gitattributes", ".x.json"], {0}),
        (["model.safetensors", "original/config.json", "1_Pooling/config.json"], {0}),
    ],
)
def test_which_files_are_wanted(names: list[str], chosen: set[int]) -> None:
    expected = sorted(names[index] for index in chosen)
    assert [file.path for file in wanted(remote(*names), source="hf://a/b")] == expected


@pytest.mark.parametrize(
    ("names", "kind", "words"),
    [
        (["README.md", "config.json"], ModelNotFound, "hf://a/b holds 2 files but no weights"),
        ([], ModelNotFound, "holds 0 files"),
        (["a-q4.gguf", "a-q8.gguf"], UnsupportedModel, r"2 \.gguf models \(a-q4.gguf, a-q8.gguf"),
    ],
)
def test_unclear_weights_are_refused(names: list[str], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        wanted(remote(*names), source="hf://a/b")


@pytest.mark.parametrize(
    ("text", "revision", "expected"),
    [
        ("hf://Qwen/Qwen3-0.6B", None, HubModel(hub="hf", repository="Qwen/Qwen3-0.6B")),
        ("hf://a/b@main", None, HubModel(hub="hf", repository="a/b", revision="main")),
        ("hf://a/b", "refs/pr/1", HubModel(hub="hf", repository="a/b", revision="refs/pr/1")),
        ("hf://a/b@v1", "v1", HubModel(hub="hf", repository="a/b", revision="v1")),
        ("modelscope://a/b", "v1", HubModel(hub="modelscope", repository="a/b", revision="v1")),
        ("s3://bucket", None, BucketModel(bucket="bucket")),
        ("s3://bucket/a b/c/", None, BucketModel(bucket="bucket", path="a b/c")),
    ],
)
def test_uris(text: str, revision: str | None, expected: object) -> None:
    assert parse_uri(text, revision=revision) == expected
    assert parse_uri(str(expected)) == expected or "/" in str(revision)


@pytest.mark.parametrize(
    ("text", "revision", "words"),
    [
        ("hf://a", None, "must be hf://org/name"),
        ("hf://a/b/c", None, "must be hf://org/name"),
        ("hf://../b", None, "names no repository"),
        ("hf://a/b c", None, "must be"),
        ("s3://", None, "must be"),
        ("s3://b/../c", None, "must not contain"),
        ("s3://b/c", "v1", "--revision is v1, but s3://b/c is a bucket"),
        ("hf://a/b@v1", "v2", "--revision is v2, but hf://a/b@v1 names v1"),
        ("/models/x", None, "must be"),
    ],
)
def test_wrong_uris(text: str, revision: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_uri(text, revision=revision)


def test_a_line_of_progress() -> None:
    now = [0.0]
    progress = Progress(total=10 << 30, kept=1 << 30, clock=lambda: now[0])
    now[0] = 10.0
    progress.add(2 << 30)
    assert progress.line() == "3.0 GiB of 10.0 GiB (30%), 204.8 MiB/s, about 35s left"
    now[0] = 1000.0
    assert progress.line() == "3.0 GiB of 10.0 GiB (30%), 0 B/s"
    progress.add(7 << 30)
    assert progress.line().startswith("10.0 GiB of 10.0 GiB (100%)")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7800, "2h10m")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert amount(1536) == "1.5 KiB"


@pytest.mark.parametrize(("failures", "least", "most"), [(1, 0.75, 1.0), (4, 6.0, 8.0), (40, 45.0, 60.0)])
def test_pauses_double_up_to_a_minute(failures: int, least: float, most: float) -> None:
    assert least <= Retries().pause(failures) <= most
    assert Retries().pause(1, after=90.0) == 90.0

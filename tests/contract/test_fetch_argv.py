"""The init container's argv parses in `reprise fetch`, and both halves mean the same by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reprise_engine.entrypoints.arguments import build_parser
from reprise_engine.entrypoints.fetch import EXIT_CODES
from reprise_engine.errors import RepriseError
from reprise_engine.fetch.uri import BucketModel, HubModel, ModelUri, parse_uri
from reprise_operator.children.fetch import CREDENTIALS, FSGROUP
from reprise_operator.plan import plan
from reprise_operator.pod_failures import LAST_WORDS
from reprise_operator.settings import Settings
from reprise_operator.spec import parse

PROJECT = Path(__file__).resolve().parents[2]


def pod(model: dict[str, Any]) -> dict[str, Any]:
    body = {
        "metadata": {"name": "svc", "namespace": "ns", "uid": "u1", "generation": 1},
        "spec": {"model": model, "accelerator": {"profile": "cpu"}},
    }
    return dict(plan(parse(body), Settings()).workload["spec"]["template"]["spec"])


def expanded(argument: str) -> str:
    """As the kubelet hands it over: `$$` is a dollar."""
    return argument.replace("$$", "$")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"uri": "hf://a/b"}, HubModel(hub="hf", repository="a/b")),
        ({"uri": "hf://a/b@v1"}, HubModel(hub="hf", repository="a/b", revision="v1")),
        ({"uri": "hf://a/b", "revision": "refs/pr/1"}, HubModel(hub="hf", repository="a/b", revision="refs/pr/1")),
        ({"uri": "hf://a/b", "revision": "--to=/x"}, HubModel(hub="hf", repository="a/b", revision="--to=/x")),
        ({"uri": "modelscope://a/b"}, HubModel(hub="modelscope", repository="a/b")),
        ({"uri": "s3://b"}, BucketModel(bucket="b")),
        ({"uri": "s3://b/a b/$(HOME)/c/"}, BucketModel(bucket="b", path="a b/$(HOME)/c")),
    ],
)
def test_what_is_fetched_is_what_the_spec_says(model: dict[str, Any], expected: ModelUri) -> None:
    spec = pod(model)
    (fetching,), (engine,) = spec["initContainers"], spec["containers"]
    parsed = build_parser().parse_args([expanded(argument) for argument in fetching["args"]])
    assert parsed.command == "fetch"
    assert parse_uri(parsed.uri, revision=parsed.revision) == expected
    assert parsed.to == Path(engine["args"][1])


def test_the_engine_reads_the_file_that_is_fetched() -> None:
    spec = pod({"uri": "s3://b/p/q4.gguf"})
    (fetching,), (engine,) = spec["initContainers"], spec["containers"]
    parsed = build_parser().parse_args(fetching["args"])
    assert Path(engine["args"][1]) == parsed.to / "q4.gguf"


def test_every_error_of_a_fetch_has_a_reason_in_the_status() -> None:
    reasons = {name for name, _ in LAST_WORDS}
    named: set[type[RepriseError]] = set(EXIT_CODES)
    assert {kind.__name__ for kind in named} - {"ConfigError"} <= reasons
    assert "InvalidArguments" in reasons, "a ConfigError"


def test_the_keys_of_the_secrets_are_the_variables_that_the_fetch_reads() -> None:
    sources = "".join(
        (PROJECT / "engine" / "reprise_engine" / "fetch" / name).read_text()
        for name in ("sources.py", "bucket_client.py")
    )
    for required, optional in CREDENTIALS.values():
        for key in (*required, *optional):
            assert f'"{key}"' in sources


def test_the_group_of_the_cache_is_that_of_the_image() -> None:
    assert f"USER {FSGROUP}:{FSGROUP}" in (PROJECT / "Dockerfile").read_text()

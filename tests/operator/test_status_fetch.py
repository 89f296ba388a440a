"""What is said of a service whose model is being fetched, or cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.factories import NOT_READY, OLD, failing, failure, observed, planned, pod
from tests.support.statuses import RECONCILING, STALLED, kstatus, message, reason, status_of

FETCHED = planned({"model": {"uri": "hf://Qwen/Qwen3-8B"}})


def test_a_fetch_that_runs_is_progress_and_says_where_to_look() -> None:
    waiting = replace(pod(ready=False), initializing="fetch")
    status = status_of(FETCHED, observed(FETCHED, waiting, status=NOT_READY))
    assert (kstatus(status), reason(status)) == (RECONCILING, "FetchingModel")
    assert message(status, "Reconciling") == (
        "qwen-a: hf://Qwen/Qwen3-8B is being fetched; `kubectl logs qwen-a -c fetch` tells how far it is."
    )


@pytest.mark.parametrize(
    "other",
    [
        pod(ready=False),
        replace(pod(ready=False), initializing="users-own"),
        replace(pod(ready=False, template=OLD), initializing="fetch"),
    ],
    ids=["fetched", "another init container", "an older template"],
)
def test_otherwise_it_is_ordinary_progress(other: object) -> None:
    assert isinstance(other, type(pod()))
    assert reason(status_of(FETCHED, observed(FETCHED, other, status=NOT_READY))) == "Progressing"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ModelFetchDenied: hf://Qwen/Qwen3-8B: HTTP 401 from huggingface.co.", "ModelFetchDenied"),
        ("ModelFetchFailed: hf://Qwen/Qwen3-8B: given up after 10 attempts.", "ModelFetchFailed"),
        ("ModelVolumeFull: /model/hf-x: No space left on device.", "ModelVolumeFull"),
        ("ModelVolumeUnusable: /model/hf-x: Permission denied.", "ModelVolumeUnusable"),
        ("ModelNotFound: hf://Qwen/Qwen3-8B: HTTP 404 from huggingface.co.", "ModelNotFound"),
        ("DamagedModel: model.safetensors: twice in a row.", "DamagedModel"),
        ("UnsupportedModel: holds 2 .gguf models.", "UnsupportedModel"),
        ("reprise: error: argument COMMAND: invalid choice: 'fetch'", "InvalidArguments"),
    ],
)
def test_why_a_fetch_failed_is_told_in_its_own_words(words: str, expected: str) -> None:
    for cause in (
        failure("Error", words=words, code=4, container="fetch", init=True),
        failure("CrashLoopBackOff", words=words, code=4, restarts=3, container="fetch", terminated="Error", init=True),
    ):
        status = status_of(FETCHED, failing(FETCHED, cause))
        assert (kstatus(status), reason(status)) == (STALLED, expected)
        assert words in message(status, "Stalled")
        assert "container fetch" in message(status, "Stalled")


def test_an_image_that_cannot_be_pulled_is_not_said_to_be_the_engines() -> None:
    cause = failure("ImagePullBackOff", container="fetch", init=True)
    status = status_of(FETCHED, failing(FETCHED, cause))
    assert reason(status) == "ImagePullFailed"

"""The ends of previous logs: which are read, how often, and what happens when they cannot be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from reprise_operator.api import Api, ClusterError, Fault
from reprise_operator.cluster import LOG_BYTES, Cluster
from reprise_operator.log_tails import READ_AT_A_TIME, LogTails
from reprise_operator.observed import ObservedPod, Termination
from tests.support.factories import NOT_READY, failure, observed, planned, pod, termination
from tests.support.statuses import conditions, message, status_of

ENDED = termination(words="it failed")


def broken(name: str = "qwen-a", ended: Termination = ENDED) -> ObservedPod:
    return replace(pod(name, ready=False), terminations=(ended,))


class Logs:
    """Answers with the pod's name, or fails."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []
        self.fault: ClusterError | None = None

    async def __call__(self, namespace: str, pod: str, container: str) -> str:
        self.asked.append((namespace, pod, container))
        if self.fault is not None:
            raise self.fault
        return f"the log of {pod}"


def told(pods: tuple[ObservedPod, ...]) -> list[str]:
    return [ended.log for pod in pods for ended in pod.terminations]


async def test_credentials_in_a_log_are_hidden_before_anybody_quotes_it() -> None:
    line = "api_server.py: error: unrecognized arguments: --hub-key hf_abcdefghijklmnopqrst"

    async def read(namespace: str, pod: str, container: str) -> str:
        return f"INFO starting\n{line}\n"

    pods = await LogTails().observe(
        "llm", [replace(broken(), failures=(failure("CrashLoopBackOff", code=2),))], read=read
    )
    assert told(pods) == ["INFO starting\napi_server.py: error: unrecognized arguments: --hub-key [hidden]\n"]
    plan = planned({"runtime": {"name": "vllm-ascend"}, "model": {"maxModelLen": 4096}})
    status = status_of(plan, observed(plan, *pods, status=NOT_READY))
    assert conditions(status)["Stalled"] == ("True", "InvalidArguments")
    assert message(status, "Stalled").endswith("unrecognized arguments: --hub-key [hidden]")


async def test_each_end_is_read_once() -> None:
    logs, tails = Logs(), LogTails()
    for _ in range(3):
        assert told(await tails.observe("llm", [broken()], read=logs)) == ["the log of qwen-a"]
    assert logs.asked == [("llm", "qwen-a", "engine")]
    again = broken(ended=replace(ENDED, container_id="containerd://2"))
    await tails.observe("llm", [again], read=logs)
    assert len(logs.asked) == 2, "another run of the container"
    tails.forget({"uid-qwen-a"})
    await tails.observe("llm", [again], read=logs)
    assert len(logs.asked) == 3


@pytest.mark.parametrize(
    "ended",
    [
        replace(ENDED, exit_code=0, reason="Completed"),
        replace(ENDED, exit_code=137, reason="OOMKilled"),
        replace(ENDED, container="sidecar"),
        replace(ENDED, is_previous=False),
    ],
    ids=["ended well", "the kubelet knows", "not ours", "not the previous log yet"],
)
async def test_what_is_not_worth_a_request(ended: Termination) -> None:
    logs = Logs()
    assert told(await LogTails().observe("llm", [broken(ended=ended)], read=logs)) == [""]
    assert logs.asked == []


async def test_a_crash_of_all_replicas_is_read_in_turns() -> None:
    logs, tails = Logs(), LogTails()
    pods = [broken(f"qwen-{number}") for number in range(READ_AT_A_TIME + 3)]
    await tails.observe("llm", pods, read=logs)
    assert len(logs.asked) == READ_AT_A_TIME
    assert all(told(await tails.observe("llm", pods, read=logs)))
    assert len(logs.asked) == READ_AT_A_TIME + 3


async def test_a_node_that_does_not_answer_is_asked_again_and_a_refusal_is_not() -> None:
    logs, tails = Logs(), LogTails()
    logs.fault = ClusterError(Fault.UNAVAILABLE, "dial tcp: connection refused", status=500)
    assert told(await tails.observe("llm", [broken()], read=logs)) == [""]
    logs.fault = ClusterError(Fault.FORBIDDEN, "pods/log is forbidden", status=403)
    assert told(await tails.observe("llm", [broken()], read=logs)) == [""]
    logs.fault = None
    assert told(await tails.observe("llm", [broken()], read=logs)) == [""]
    assert len(logs.asked) == 2


# Over HTTP ----------------------------------------------------------------------------------------------------------


class Server:
    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str], str]] = []
        self.text = b""

    async def log(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, dict(request.query), request.headers["Accept"]))
        if not self.text:
            message = 'previous terminated container "engine" in pod "p" not found'
            return web.json_response({"message": message}, status=400)
        return web.Response(body=self.text, content_type="text/plain")


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, Cluster]]:
    served = Server()
    app = web.Application()
    app.router.add_get("/{path:.*}", served.log)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with Api(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")) as api:
        yield served, Cluster(api)
    await runner.cleanup()


async def test_the_end_of_a_long_log_is_kept_and_no_more(server: tuple[Server, Cluster]) -> None:
    served, cluster = server
    served.text = b"x" * (5 * LOG_BYTES) + "\nNPU out of memory. Größe\n".encode()
    tail = await cluster.log_tail("llm", "p", "engine")
    assert tail.endswith("x\nNPU out of memory. Größe\n")
    assert len(tail.encode()) == LOG_BYTES
    ((path, query, accept),) = served.asked
    assert path == "/api/v1/namespaces/llm/pods/p/log"
    assert query == {"container": "engine", "previous": "true", "tailLines": "1000"}
    assert "text/plain" in accept


async def test_no_previous_log_is_a_typed_fault(server: tuple[Server, Cluster]) -> None:
    _, cluster = server
    with pytest.raises(ClusterError, match="previous terminated container") as caught:
        await cluster.log_tail("llm", "p", "engine")
    assert caught.value.fault is Fault.INVALID
